"""The memory of this process: how much of it is resident, and giving back what is free."""

import ctypes
import os
from pathlib import Path

_STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Resident memory of this process in bytes, including shared pages; 0 if ``/proc`` cannot be read."""
    try:
        return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def give_back_memory() -> None:
    """Make the C library return freed memory to the system, after work that needed much of it for a moment.

    When Python or Rust frees an object, the C library keeps the memory for the thread that allocated it, so one large
    request would make a process large for good. The call takes milliseconds but releases the GIL: call it in another
    thread than the event loop's. It does nothing where the C library lacks ``malloc_trim``.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
