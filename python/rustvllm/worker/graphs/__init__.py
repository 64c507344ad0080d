"""CUDA graphs: steps that are launched as a whole."""
