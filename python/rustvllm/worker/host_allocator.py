"""How the C library gives memory back: not at all, once the model is loaded.

A step's activations are freed before the next one takes as many. By default glibc returns large pieces to the system
each time, and the system clears every page again at the next step's first touch.
"""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_KEPT_BYTES = 2**31 - 1
"""The most that mallopt takes."""


def keep_freed_memory() -> bool:
    """Have freed memory stay with this process, up to 2 GiB.

    Returns:
        Whether the C library did as told: glibc does, an old one only in part, musl not at all.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, 1 << 30)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))
