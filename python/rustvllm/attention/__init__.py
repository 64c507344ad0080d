"""Attention over the paged KV cache: the inputs that describe a step, and the backends that compute it."""
