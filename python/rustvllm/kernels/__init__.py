"""Triton kernels, one family a file, and in ``reference`` the same in plain torch.

Only who computes on a GPU imports what is in here: Triton is imported with it. Without a GPU the kernels run in
Triton's interpreter, which is chosen before the first import by ``TRITON_INTERPRET=1`` and is for tests alone.
"""
