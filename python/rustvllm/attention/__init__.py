"""Attention over the paged KV cache: what a step needs to know, and the backends that compute it."""
