"""The supported models, each in its own readable file, written for flattened tokens and a paged KV cache."""
