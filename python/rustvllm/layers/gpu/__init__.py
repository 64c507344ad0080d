"""Dense layers on a GPU, computed by kernels in Triton."""
