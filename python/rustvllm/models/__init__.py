"""The models that are served, each a readable file: written for flattened tokens and a paged KV cache."""
