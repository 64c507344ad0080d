""":class:`ParentLink`: a child's end of what :class:`~rustvllm.process.child.ChildProcess` begins.

A thread reads orders from standard input. When that ends, the parent is gone, and so is this process a moment later,
with its directory; while it loads, the kernel ends it.
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

from rustvllm.logger import init_logger
from rustvllm.process.output.serving_output import drain

logger = init_logger(__name__)

_PR_SET_PDEATHSIG = 1


class ParentLink:
    """Made first thing in a child.

    Attributes:
        args: The flags of its command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self._directory = Path(args.directory)
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._status = os.fdopen(args.status_fd, "w", encoding="utf-8")
        # The parent decides about Ctrl-C: it lets open requests end first.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _wake_with_parent()
        self._end_with_parent_at_once(True)
        threading.Thread(target=self._listen, name="rustvllm-parent", daemon=True).start()

    @classmethod
    def from_command_line(cls, program: str, argv: Sequence[str] | None, *more_flags: str) -> "ParentLink":
        """The link of a child whose parent gave it the usual flags, and ``more_flags`` with a value each."""
        parser = argparse.ArgumentParser(prog=program, description="Started by `rustvllm serve` and AsyncLLM only.")
        parser.add_argument("--status-fd", type=int, required=True, help="pipe to say on that it is ready, or why not")
        parser.add_argument("--directory", required=True, help="private directory, removed when the parent is gone")
        parser.add_argument("--started-at", type=float, required=True, help="seconds of the monotonic clock")
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
        """Tell the parent that this process serves.

        Args:
            seconds: How long that took.
            phases: What they were spent on, by name.
            facts: What else the parent needs to know.
        """
        self._end_with_parent_at_once(False)
        rounded = {name: round(spent, 3) for name, spent in phases.items()}
        self.say(ready={"seconds": round(seconds, 3), "phases": rounded, **facts})

    def say(self, **what: Any) -> None:
        """Tell the parent something."""
        try:
            self._status.write(json.dumps(what) + "\n")
            self._status.flush()
        except BrokenPipeError:
            logger.debug("the parent no longer waits for this process")

    def say_error(self, error: BaseException) -> None:
        """Tell the parent why this process cannot start."""
        self.say(error={"type": type(error).__name__, "message": str(error)})

    def _end_with_parent_at_once(self, yes: bool) -> None:
        """Whether the kernel ends this process when the parent's end of the pipe for news is closed.

        It does while this process loads: a library that is being loaded can keep the interpreter, and with it the
        thread that would notice, for seconds. Nothing is on the disk then that would have to be removed.
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
        # Last of all: an engine that still runs makes the directory again when it finds it gone.
        shutil.rmtree(self._directory, ignore_errors=True)
        os._exit(0)


def _wake_with_parent() -> None:
    """A process that was stopped (SIGSTOP) could not notice the end of its parent: the kernel lets it go on then."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)
