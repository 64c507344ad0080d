""":class:`ChildProcess`: runs a module of this package in a child process, with a pipe in each direction.

The child is started as ``python -m MODULE``, so that no process with threads is forked and nothing is pickled. The
parent writes orders to the child's standard input as lines of JSON, which a list of processes does not show. When the
parent ends, that pipe closes, and the child ends too (:mod:`rustvllm.process.parent_link`). The child writes its status
to the other pipe, also as lines of JSON.
"""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rustvllm import exceptions
from rustvllm.exceptions import EngineDeadError, RustVLLMError
from rustvllm.process.output.standard_streams import open_missing

SECRET_VARIABLES = ("RUSTVLLM_API_KEY", "RUSTVLLM_ENGINE_SECRET")
"""Environment variables that a child does not inherit; orders give it the secrets that it needs."""
_PIPE_BYTES = 1 << 20
"""Capacity of the pipe for orders: a longer order makes the parent wait until the child reads it."""
_LONGEST_LINE = 1 << 20
"""Most characters of a status line."""


class ChildProcess:
    """A child process; the constructor starts it.

    Args:
        module: Full name of the module to run.
        name: Name of the process in messages, such as ``engine process 0``.
        directory: Private directory that the child removes when this process has ended.
        arguments: Further flags for the module. Every user of the machine can read them.
        pass_fds: Descriptors that the child inherits.

    Attributes:
        ready: The facts that the child reported when it was ready; empty before.
        death: Why the child ended, in its own words, if it could report that.

    Raises:
        OSError: The process cannot be started.
    """

    def __init__(
        self, module: str, name: str, directory: Path, arguments: Sequence[str] = (), pass_fds: Sequence[int] = ()
    ) -> None:
        self.name = name
        self.ready: Mapping[str, Any] = {}
        self.death: str | None = None
        open_missing()  # else a pipe could get number 0, 1 or 2, where the child expects its standard streams
        status_fd, status_for_child = os.pipe()
        command = [sys.executable, "-m", module, "--status-fd", str(status_for_child)]
        command += ["--directory", str(directory), "--started-at", f"{time.monotonic():.3f}", *arguments]
        try:
            self._process = subprocess.Popen(  # noqa: S603 -- our own module in our own interpreter
                command,
                stdin=subprocess.PIPE,
                pass_fds=(status_for_child, *pass_fds),
                process_group=0,  # Ctrl-C in the terminal reaches the parent only, which lets open requests end first
                env={name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES},
            )
        except BaseException:
            os.close(status_fd)
            raise
        finally:
            os.close(status_for_child)
        assert self._process.stdin is not None
        self._orders = self._process.stdin
        with contextlib.suppress(OSError):  # this user's limit on pipe memory is reached: a long order may wait then
            fcntl.fcntl(self._orders, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._status = os.fdopen(status_fd, encoding="utf-8", errors="replace")

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    @property
    def end(self) -> str:
        """How the process ended, in words."""
        code = self._process.returncode
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"with exit code {code}"

    def order(self, order: Mapping[str, Any]) -> None:
        """Send one order; does nothing if the child has ended."""
        with contextlib.suppress(OSError):
            self._orders.write(json.dumps(order).encode() + b"\n")
            self._orders.flush()

    def _read_status(self) -> dict[str, Any] | None:
        """Wait for the child's next status; None if the pipe has ended."""
        line = self._status.readline(_LONGEST_LINE)
        try:
            status: dict[str, Any] = json.loads(line)
        except ValueError:  # the end of the pipe, or half a line of a child that was killed while it wrote
            return None
        return status

    def wait_until_ready(self) -> None:
        """Wait for the child's first status and store it in ``ready``.

        Raises:
            RustVLLMError: The child could not start; this is the error that it raised.
            EngineDeadError: The child ended without a status, or reported that it is dead.
        """
        status = self._read_status()
        if status is None:
            self._process.wait()
            raise EngineDeadError(f"the {self.name} ended while it was starting, {self.end}")
        if (error := status.get("error")) is not None:
            raise as_exception(self.name, error)
        if (death := status.get("death")) is not None:
            raise EngineDeadError(death)
        self.ready = status["ready"]

    def wait_for_end(self) -> None:
        """Wait until the process has ended, and store in ``death`` why if it reports that."""
        while (status := self._read_status()) is not None:
            self.death = status.get("death", self.death)
        self._process.wait()

    @property
    def why_ended(self) -> str:
        """Why the process ended: as it reported, else its exit code or signal."""
        return self.death or f"the {self.name} ended, {self.end}"

    def signal(self, number: int) -> None:
        """Send a signal; does nothing if the child has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most ``timeout`` seconds (None: without a limit) for its end; returns whether it has ended."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """Kill the process and wait until it has ended."""
        self.signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Close the pipes; a child that still runs then ends."""
        for pipe in (self._orders, self._status):
            with contextlib.suppress(OSError):
                pipe.close()


def as_exception(name: str, error: Mapping[str, str]) -> RustVLLMError:
    """Rebuild the exception that a child reported with ``ParentLink.say_error``.

    Args:
        name: Name of the child in messages.
        error: The reported ``type`` and ``message``. Types other than this package's become ``EngineDeadError``.
    """
    kind = getattr(exceptions, error["type"], None)
    if isinstance(kind, type) and issubclass(kind, RustVLLMError):
        return kind(error["message"])
    return EngineDeadError(f"the {name} could not start: {error['type']}: {error['message']}")
