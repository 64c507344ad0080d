"""Descriptors 0, 1 and 2 of a process that was started without some of them (``<&-``, a bare supervisor).

A socket or pipe that takes such a number is overwritten by the next child process, which expects its streams there.
"""

import contextlib
import os
import sys
from typing import NoReturn

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_missing() -> None:
    """Put ``/dev/null`` where a standard descriptor is closed; call it before anything else opens one."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest free number is taken first
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 -- stays open


def leave(exit_code: int) -> NoReturn:
    """End the process at once, with what it has printed written and nothing else waited for."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nothing reads it, or it is closed
            stream.flush()
    os._exit(exit_code)
