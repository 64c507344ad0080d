"""The times of an engine's steps, and a file of them."""
