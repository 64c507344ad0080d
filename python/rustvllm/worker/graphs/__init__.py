"""CUDA graphs: a whole step in one launch."""
