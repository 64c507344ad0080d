"""Tokenizers and chat templates: everything between the text that people write and the tokens that a model reads."""
