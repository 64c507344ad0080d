"""Triton kernels, one family a file, and in ``reference`` the same in plain torch.

Only code that computes on a GPU imports this package, since it imports Triton. Without a GPU the kernels run in
Triton's interpreter, which is chosen before the first import by ``TRITON_INTERPRET=1`` and is for tests alone.
"""
