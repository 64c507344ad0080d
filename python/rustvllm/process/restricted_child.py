"""Starts child processes for work on what is not trusted: almost no environment, and a socket as standard input."""

import contextlib
import os
import socket
import subprocess
import sys
from typing import Final

_KEPT_VARIABLES: Final = ("LD_LIBRARY_PATH", "PATH", "PYTHONDONTWRITEBYTECODE", "PYTHONHOME", "PYTHONPATH", "TZ")
"""What an interpreter needs to start; everything else of the environment may be a secret."""


def start_restricted(module: str, wall_seconds: float) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Run a module of this package, which limits itself (:func:`rustvllm.process.own_limits.limit_this_process`).

    Args:
        module: Full name of the module.
        wall_seconds: Time limit of each operation on the socket, on a busy machine.

    Returns:
        The process, and the socket whose other end is its standard input.

    Raises:
        OSError: The process cannot be started.
    """
    channel, theirs = socket.socketpair()
    channel.settimeout(wall_seconds)
    try:
        with theirs:
            process = subprocess.Popen(  # noqa: S603 -- our own module in our own interpreter
                [sys.executable, "-m", module],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
                start_new_session=True,  # Ctrl-C in the terminal must reach the server only
            )
    except BaseException:
        channel.close()
        raise
    return process, channel


def end_restricted(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    """Kill a process, wait until its memory is released, and close the socket."""
    channel.close()
    with contextlib.suppress(OSError):
        process.kill()
    process.wait()
