""":class:`ChildProcess`: a module of this package as a process of its own, and the two pipes to it.

The child is started as ``python -m MODULE``: no fork of a process with threads, no pickle. Orders go down its standard
input as lines of JSON, so that nothing of them shows in a list of processes; that pipe ends with this process, and the
child with it (:mod:`rustvllm.process.parent_link`). What the child has to say comes up another pipe, as lines of JSON.
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
"""Not in the environment of a child: what it needs of them is in its orders."""
_PIPE_BYTES = 1 << 20
"""What an order may have without this process waiting until the child reads it."""
_LONGEST_LINE = 1 << 20


class ChildProcess:
    """Starts the module at once.

    Args:
        module: Its full name.
        name: What messages call the process: ``engine process 0``.
        directory: Private directory that the child removes when this process is gone.
        arguments: Further flags for it; every user of the machine can read them.
        pass_fds: Descriptors that it inherits.

    Attributes:
        ready: What it said when it was ready; empty before.
        death: Why it ended, in its own words, if it could say so.

    Raises:
        OSError: The process cannot be started.
    """

    def __init__(
        self, module: str, name: str, directory: Path, arguments: Sequence[str] = (), pass_fds: Sequence[int] = ()
    ) -> None:
        self.name = name
        self.ready: Mapping[str, Any] = {}
        self.death: str | None = None
        open_missing()  # the child's standard input would take the place of a pipe that has its number
        status_fd, status_for_child = os.pipe()
        command = [sys.executable, "-m", module, "--status-fd", str(status_for_child)]
        command += ["--directory", str(directory), "--started-at", f"{time.monotonic():.3f}", *arguments]
        try:
            self._process = subprocess.Popen(  # noqa: S603 -- our own module in our own interpreter
                command,
                stdin=subprocess.PIPE,
                pass_fds=(status_for_child, *pass_fds),
                process_group=0,  # a Ctrl-C of the terminal is for the parent, which lets open requests end first
                env={name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES},
            )
        except BaseException:
            os.close(status_fd)
            raise
        finally:
            os.close(status_for_child)
        assert self._process.stdin is not None
        self._orders = self._process.stdin
        with contextlib.suppress(OSError):  # the user has many pipes: then an order waits for its reader
            fcntl.fcntl(self._orders, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._status = os.fdopen(status_fd, encoding="utf-8", errors="replace")

    @property
    def pid(self) -> int:
        """Its number."""
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
        """Send one order; one that has ended takes none."""
        with contextlib.suppress(OSError):
            self._orders.write(json.dumps(order).encode() + b"\n")
            self._orders.flush()

    def _read_status(self) -> dict[str, Any] | None:
        """Wait for the next thing that it says; None when it will say nothing any more."""
        line = self._status.readline(_LONGEST_LINE)
        try:
            status: dict[str, Any] = json.loads(line)
        except ValueError:  # the end, or the half of a line that it was killed over
            return None
        return status

    def wait_until_ready(self) -> None:
        """Wait for what it says first.

        Raises:
            RustVLLMError: What kept it from starting, as it was raised there.
            EngineDeadError: It ended without a word.
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
        """Wait until the process has ended."""
        while (status := self._read_status()) is not None:
            self.death = status.get("death", self.death)
        self._process.wait()

    @property
    def why_ended(self) -> str:
        """Why the process ended, in its own words or as the kernel tells."""
        return self.death or f"the {self.name} ended, {self.end}"

    def signal(self, number: int) -> None:
        """Send a signal; one that has ended gets none."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait so many seconds for its end; whether it has come."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """End it at once and wait for that."""
        self.signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Give back the pipes; a child that still runs ends by that."""
        for pipe in (self._orders, self._status):
            with contextlib.suppress(OSError):
                pipe.close()


def as_exception(name: str, error: Mapping[str, str]) -> RustVLLMError:
    """What a child raised, as it said so (``ParentLink.say_error``)."""
    kind = getattr(exceptions, error["type"], None)
    if isinstance(kind, type) and issubclass(kind, RustVLLMError):
        return kind(error["message"])
    return EngineDeadError(f"the {name} could not start: {error['type']}: {error['message']}")
