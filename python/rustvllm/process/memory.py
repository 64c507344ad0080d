"""Gives memory back to the system after work that took much of it for a moment."""

import ctypes


def give_back_memory() -> None:
    """Return what the C library keeps for later; takes milliseconds, without the interpreter: for a thread.

    What Python's and Rust's objects took is freed to the C library, which keeps it for the threads that allocated it:
    one large request would make a process large for good. C libraries that have no such call keep less.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
