"""Triton kernels, one family per file; ``reference`` has the same functions in plain torch.

Only code that computes on a GPU imports this package, because it imports Triton. Without a GPU the kernels run in
Triton's interpreter, which ``TRITON_INTERPRET=1`` selects before the first import; it is only for tests.
"""
