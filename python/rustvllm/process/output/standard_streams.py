"""Descriptors 0, 1 and 2 of a process: those that it was started without, and output that cannot be written.

``<&-`` or a bare supervisor starts a process without some of them. A socket or pipe that takes such a number is
overwritten by the next child process, which expects its streams there.
"""

import contextlib
import io
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


def replace_unwritable() -> None:
    """Have standard output write ``?`` for characters that its encoding lacks, as it may in another locale than UTF-8.

    Standard error escapes them by itself.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="replace")


def discard_output() -> None:
    """Write what is left for standard output, and what is still printed, to nowhere: nothing can be written there."""
    with contextlib.suppress(OSError, ValueError):  # it has no descriptor, as in a notebook
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def leave(exit_code: int) -> NoReturn:
    """End the process at once, with what it has printed written and nothing else waited for."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nothing reads it, or it is closed
            stream.flush()
    os._exit(exit_code)
