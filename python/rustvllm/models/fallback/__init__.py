"""Models run by transformers' own modelling code over the paged KV cache."""
