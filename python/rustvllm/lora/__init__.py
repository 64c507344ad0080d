"""Adapters: low-rank weights that are added to a model's own, each for its own requests (``docs/lora.md``)."""
