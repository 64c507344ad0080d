"""Models run by transformers' modelling code over the paged KV cache."""
