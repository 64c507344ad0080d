"""Ranks that hold one model together, and how they find each other. Tensors travel by torch.distributed."""
