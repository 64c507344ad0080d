"""Dense layers on a GPU, computed by Triton kernels."""
