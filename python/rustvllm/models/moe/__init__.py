"""Models with experts, one file per family."""
