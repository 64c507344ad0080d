"""Standard input, output and error of a process that was started without them, or cannot write to them.

``<&-`` in a shell, or a minimal supervisor, can start a process without descriptors 0, 1 or 2. A socket or pipe would
then get such a number, and the next child process would take it for its standard stream.
"""

import contextlib
import io
import os
import sys
from typing import NoReturn

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_missing() -> None:
    """Open ``/dev/null`` as each standard descriptor that is closed. Call it before anything else opens a file."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest free number is taken first
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 -- stays open


def replace_unwritable() -> None:
    """Make standard output write ``?`` for characters that its encoding lacks; locales without UTF-8 lack many.

    Standard error needs no change: Python escapes such characters there.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="replace")


def discard_output() -> None:
    """Discard what standard output still has to write, and all later output, after a write to it has failed."""
    with contextlib.suppress(OSError, ValueError):  # it has no descriptor, as in a notebook
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def leave(exit_code: int) -> NoReturn:
    """Flush standard output and standard error, then end the process without further clean-up."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader is gone, or it is closed
            stream.flush()
    os._exit(exit_code)
