"""Keeps the C library from returning freed memory to the system once the model is loaded.

A step frees its activations before the next one allocates as much again. By default glibc returns large pieces to the
system each time, and the system clears every page again when the next step first touches it.
"""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_KEPT_BYTES = 2**31 - 1
"""The largest value that mallopt takes."""


def keep_freed_memory() -> bool:
    """Make freed memory stay with this process, up to 2 GiB.

    Returns:
        Whether the C library accepted all settings: glibc does, an old one only some, musl none.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, 1 << 30)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))
