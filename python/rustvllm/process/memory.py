"""Returns freed memory to the system after work that needed much of it for a moment."""

import ctypes


def give_back_memory() -> None:
    """Make the C library return freed memory to the system.

    When Python or Rust frees an object, the C library keeps the memory for the thread that allocated it, so one large
    request would make a process large for good. The call takes milliseconds but releases the GIL: call it in another
    thread than the event loop's. It does nothing where the C library lacks ``malloc_trim``.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
