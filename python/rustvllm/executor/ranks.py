"""``Ranks``: the processes that follow rank 0, from their start to their end, and why one ended too soon."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rustvllm.exceptions import DeviceFailedError, ModelLoadError, RustVLLMError
from rustvllm.logger import init_logger
from rustvllm.process.child import ChildProcess, as_exception

if TYPE_CHECKING:
    from rustvllm import _core

logger = init_logger(__name__)

_NO_DIRECTORY = Path("/dev/null/no-directory")
"""A rank has no files, so there is none to remove."""
_END_SECONDS = 5.0
"""For ranks to end after a shutdown, before they are killed."""


class RankProcess(ChildProcess):
    """One process.

    Args:
        rank: From 1.
        pass_fds: Descriptors that it inherits: of the step channel, and of the meeting if there is one.

    Attributes:
        rank: As given.
        error: What it raised, if it could say so.
    """

    def __init__(self, rank: int, pass_fds: Sequence[int]) -> None:
        super().__init__("rustvllm.worker.process", f"worker rank {rank}", _NO_DIRECTORY, pass_fds=pass_fds)
        self.rank = rank
        self.error: RustVLLMError | None = None

    @property
    def place(self) -> str:
        """How messages name it."""
        return f"worker rank {self.rank} (node 0, pid {self.pid})"

    def listen(self, on_hello: Callable[[int], object]) -> None:
        """Hear what it says until it has ended."""
        while (status := self._read_status()) is not None:
            if "ready" in status:
                on_hello(self.rank)
            self.death = status.get("death", self.death)
            if (error := status.get("error")) is not None:
                self.error = as_exception(self.name, error)
        self.wait()

    @property
    def end_in_words(self) -> str:
        """Who ended and why."""
        if self.error is not None:
            return f"{self.place}: {self.error}"
        if self.death is not None:
            return f"{self.place} ended: {self.death}"
        return f"{self.place} {'was ' if self.end.startswith('killed') else 'ended '}{self.end}"


class Ranks:
    """Starts the processes at once; a thread for each hears of its end.

    The end of one is the end of all: what waits for it in a collective would wait in vain.

    Args:
        size: Ranks of the group, rank 0 included.
        writer: Of the step channel; it is given up when a rank ends.
        meetings: Where CPU ranks add; likewise. None of them: torch carries all tensors.

    Attributes:
        processes: Of ranks 1, 2, ….
    """

    def __init__(self, size: int, writer: _core.StepWriter, meetings: Sequence[_core.RankMeeting] = ()) -> None:
        self._writer, self._meetings = writer, tuple(meetings)
        self._lock = threading.Lock()
        self._death: str | None = None
        self._error: RustVLLMError | None = None
        self._is_over = threading.Event()
        self._is_stopping = False
        self._on_death: list[Callable[[], object]] = []
        self._hellos: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self.processes: list[RankProcess] = []
        try:
            pass_fds = [writer.fileno(), *(meeting.fileno() for meeting in self._meetings)]
            self.processes.extend(RankProcess(rank, pass_fds) for rank in range(1, size))
        except BaseException:
            self.stop(0.0)
            raise
        for process in self.processes:
            name = f"rustvllm-rank-{process.rank}"
            threading.Thread(target=self._hear, args=(process,), name=name, daemon=True).start()

    def order(self, order: Mapping[str, Any]) -> None:
        """Send every rank the same order, with its own number."""
        for process in self.processes:
            process.order({**order, "rank": process.rank})

    def wait_for_hellos(self, seconds: float) -> None:
        """Wait until every rank has said that it joins.

        Raises:
            ModelLoadError: One did not come in time.
            RustVLLMError: What one raised.
            DeviceFailedError: One has ended.
        """
        deadline = time.monotonic() + seconds
        missing = {process.rank: process for process in self.processes}
        while missing:
            with contextlib.suppress(queue.Empty):
                rank = self._hellos.get(timeout=max(0.0, deadline - time.monotonic()))
                if rank is not None:
                    del missing[rank]
                    continue
            self.check()
            names = ", ".join(process.place for process in missing.values())
            raise ModelLoadError(f"{names} did not join within {seconds:g} s: the machine may be too busy; start again")

    def watch(self, on_death: Callable[[], object]) -> None:
        """Call this, in whatever thread, once a rank has ended."""
        with self._lock:
            self._on_death.append(on_death)
            is_dead = self._death is not None
        if is_dead:
            on_death()

    @property
    def death(self) -> str | None:
        """Which rank ended first, and why; None: all run."""
        return self._death

    def check(self, seconds: float = 0.0) -> None:
        """Raise when a rank has ended; its end may be waited for, if something points to it.

        Raises:
            DeviceFailedError: Names the rank, and why it ended.
            RustVLLMError: What it raised itself, while it started.
        """
        if not self._is_over.wait(seconds) if seconds else self._death is None:
            return
        if self._error is not None:
            raise self._error
        if self._death is not None:
            raise DeviceFailedError(self._death)

    def stop(self, seconds: float = _END_SECONDS) -> None:
        """Have every process end; those that have not after so many seconds are killed."""
        with self._lock:
            self._is_stopping = True
        deadline = time.monotonic() + seconds
        for process in self.processes:
            if not process.wait(max(0.0, deadline - time.monotonic())):
                process.kill()
        for process in self.processes:
            process.close()

    def _hear(self, process: RankProcess) -> None:
        with contextlib.suppress(OSError, ValueError):  # the pipe was closed
            process.listen(self._hellos.put)
        with self._lock:
            if self._is_stopping or self._death is not None:
                return
            self._error, self._death = process.error, process.end_in_words
            callbacks = list(self._on_death)
        logger.error("%s; the other ranks end with it", self._death)
        self._writer.give_up()
        for meeting in self._meetings:
            meeting.give_up()
        # What waits for the dead rank in a collective of torch's hears of it when all connections are gone.
        for other in self.processes:
            if other is not process:
                other.signal(signal.SIGKILL)
        self._is_over.set()
        self._hellos.put(None)
        for callback in callbacks:
            callback()


def state_of(pid: int) -> str:
    """What the kernel says of a process: ``running``, ``sleeping``, ``stopped``, ``waiting for a disk`` or ``gone``."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return "gone"
    letter = text.rpartition(")")[2].split()[:1]
    names = {"R": "running", "S": "sleeping", "T": "stopped", "t": "stopped by a debugger", "D": "waiting for a disk"}
    return names.get(letter[0] if letter else "", "gone")


def ask_for_stack(pid: int) -> None:
    """Have a rank write its Python stack to standard error."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGUSR1)
