"""Text to tokens and back, and chat templates: everything between what people write and what a model reads."""
