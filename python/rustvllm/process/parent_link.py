""":class:`ParentLink`: the child's end of the pipes that :class:`~rustvllm.process.child.ChildProcess` opens.

A thread reads orders from standard input. End of file means that the parent has ended; the thread then removes the
private directory and ends this process. While the process loads, the kernel ends it instead.
"""

import argparse
import contextlib
import ctypes
import fcntl
import json
import os
import queue
import shutil
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rustvllm.exceptions import ModelLoadError
from rustvllm.logger import init_logger
from rustvllm.process.output.serving_output import drain
from rustvllm.process.startup_memory import explain_shortage

logger = init_logger(__name__)

_PR_SET_PDEATHSIG = 1


class ParentLink:
    """The link of this process to its parent. A child makes it before anything else.

    Attributes:
        args: The flags of the child's command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self._directory = Path(args.directory)
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._status = os.fdopen(args.status_fd, "w", encoding="utf-8")
        # The parent handles Ctrl-C: it lets open requests end first.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _wake_with_parent()
        self._end_with_parent_at_once(True)
        try:
            threading.Thread(target=self._listen, name="rustvllm-parent", daemon=True).start()
        except RuntimeError as error:
            self.say_error(error)
            raise SystemExit(1) from error

    @classmethod
    def from_command_line(cls, program: str, argv: Sequence[str] | None, *more_flags: str) -> "ParentLink":
        """Parse the command line of a child and make its link.

        Args:
            program: Name of the program in the parser's messages.
            argv: The arguments; None: those of this process.
            *more_flags: Required flags in addition to those that ``ChildProcess`` always passes; each has a value.
        """
        parser = argparse.ArgumentParser(
            prog=program, description="Only `rustvllm serve`, LLM and AsyncLLM start this program."
        )
        parser.add_argument(
            "--status-fd", type=int, required=True, help="pipe on which this process reports its status"
        )
        parser.add_argument("--directory", required=True, help="private directory, removed when the parent has ended")
        parser.add_argument(
            "--started-at", type=float, required=True, help="monotonic time in seconds when its start began"
        )
        for flag in more_flags:
            parser.add_argument(flag, required=True)
        return cls(parser.parse_args(argv))

    @property
    def age(self) -> float:
        """Seconds since the parent began to start this process."""
        return time.monotonic() - float(self.args.started_at)

    def receive(self) -> dict[str, Any]:
        """Wait for the next order."""
        return self._orders.get()

    def say_ready(self, seconds: float, phases: Mapping[str, float], **facts: Any) -> None:
        """Report to the parent that this process is ready.

        Args:
            seconds: How long the start took.
            phases: Seconds of each phase of the start, by name.
            facts: Other facts for the parent; must be JSON values.
        """
        self._end_with_parent_at_once(False)
        rounded = {name: round(spent, 3) for name, spent in phases.items()}
        self.say(ready={"seconds": round(seconds, 3), "phases": rounded, **facts})

    def say(self, **what: Any) -> None:
        """Send a status to the parent; does nothing if the parent has closed the pipe."""
        try:
            self._status.write(json.dumps(what) + "\n")
            self._status.flush()
        except BrokenPipeError:
            logger.debug("the parent no longer waits for this process")

    def say_error(self, error: BaseException) -> None:
        """Report to the parent why this process cannot start: in one line if the machine has too little for it."""
        if (shortage := explain_shortage(error)) is not None:
            error = ModelLoadError(shortage)
        self.say(error={"type": type(error).__name__, "message": str(error)})

    def _end_with_parent_at_once(self, yes: bool) -> None:
        """Set whether the kernel ends this process as soon as the parent closes its end of the status pipe.

        This is set while the process loads: loading a library can hold the GIL for seconds, and the thread that would
        notice the end of the parent cannot run then. At that time there is nothing on disk to remove.
        """
        descriptor = self._status.fileno()
        fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        # SIGIO comes when the pipe has no reader left, and by default ends the process.
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC if yes else flags & ~os.O_ASYNC)

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError), os.fdopen(0, "rb", closefd=False) as lines:
            for line in lines:
                self._orders.put(json.loads(line))
        drain()
        # Last of all: an engine that still runs would make the directory again.
        shutil.rmtree(self._directory, ignore_errors=True)
        os._exit(0)


def _wake_with_parent() -> None:
    """Make the kernel send SIGCONT when the parent ends: a stopped process could not notice that by itself."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)
