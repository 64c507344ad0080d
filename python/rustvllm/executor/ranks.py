"""``Ranks``: the processes that follow rank 0, from start to end, and the reason if one ends too soon."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rustvllm.distributed import nodes
from rustvllm.exceptions import DeviceFailedError, ModelLoadError, RustVLLMError
from rustvllm.executor.rank_end import end_in_words, place_of
from rustvllm.logger import init_logger
from rustvllm.process.child import ChildProcess, as_exception

if TYPE_CHECKING:
    from rustvllm import _core
    from rustvllm.executor.node_ranks import NodeRanks, RemoteRank

logger = init_logger(__name__)

_NO_DIRECTORY = Path("/dev/null/no-directory")
"""A rank has no folder of its own that would have to be removed."""
HOST = "127.0.0.1"
"""The address over which the ranks of one machine meet."""
_STACK_SECONDS = 1.0
"""How long a rank may take to write its stack."""
_END_SECONDS = 5.0
"""How long ranks may take to end after a shutdown before they are killed."""


class RankProcess(ChildProcess):
    """The process of one rank on this machine.

    Args:
        rank: Its number, from 1.
        pass_fds: File descriptors that it inherits: the step channel, and the meetings if there are any.
        node_rank: The number of this machine.

    Attributes:
        rank: As given.
        node_rank: As given.
        error: The error that it raised, if it could report one.
    """

    def __init__(self, rank: int, pass_fds: Sequence[int], node_rank: int = 0) -> None:
        super().__init__("rustvllm.worker.process", f"worker rank {rank}", _NO_DIRECTORY, pass_fds=pass_fds)
        self.rank, self.node_rank = rank, node_rank
        self._stack_fd = -1
        self.error: RustVLLMError | None = None

    @property
    def place(self) -> str:
        """Its name in messages."""
        return place_of(self.rank, self.node_rank, self.pid)

    @property
    def state(self) -> str:
        """Its state, according to the kernel; see ``state_of``."""
        return state_of(self.pid)

    def stack(self) -> str:
        """Its Python stack, which it can write to its memory file even while it hangs; or why the stack is unknown."""
        place = Path(f"/proc/{self.pid}/fd/{self._stack_fd}")
        try:
            before = place.stat().st_size
            self.signal(signal.SIGUSR1)
            deadline = time.monotonic() + _STACK_SECONDS
            while time.monotonic() < deadline:
                time.sleep(_STACK_SECONDS / 10)
                if text := place.read_bytes()[before:]:
                    return text.decode(errors="replace").rstrip()
        except OSError as error:
            return f"unknown ({error})"
        return f"unknown: it wrote none within {_STACK_SECONDS:g} s"

    def said(self) -> Iterator[dict[str, Any]]:
        """Its messages, until its pipe ends."""
        while (status := self._read_status()) is not None:
            self._stack_fd = status.get("ready", {}).get("stack_fd", self._stack_fd)
            yield status

    def listen(self, on_hello: Callable[[int], object]) -> None:
        """Process its messages until it has ended."""
        for status in self.said():
            if "ready" in status:
                on_hello(self.rank)
            self.death = status.get("death", self.death)
            if (error := status.get("error")) is not None:
                self.error = as_exception(self.name, error)
        self.wait()

    @property
    def end_in_words(self) -> str:
        """Which rank ended, and why."""
        return end_in_words(self.place, self.error, self.death, self.end)


class Ranks:
    """Starts the processes when it is made; a thread for each notices its end.

    If one rank ends, all end, because ranks that wait for it in a collective would wait forever.

    Args:
        size: The number of ranks on this machine, including rank 0.
        writer: The step channel's writer, which gives up when a rank ends.
        meetings: The memory in which CPU ranks sum, by stage, which also gives up then. If empty, torch carries all
            tensors.

    Attributes:
        processes: The processes of ranks 1, 2, …; ranks of other machines follow as they are added.
    """

    def __init__(
        self, size: int, writer: _core.StepWriter, meetings: Mapping[int, _core.RankMeeting] = MappingProxyType({})
    ) -> None:
        self._writer, self._meetings = writer, tuple(meetings.values())
        self._own_order = {
            "channel_fd": writer.fileno(),
            "meeting_fds": {str(stage): meeting.fileno() for stage, meeting in meetings.items()},
            "num_neighbours": size,
            "own_host": HOST,
        }
        self._lock = threading.Lock()
        self._death: str | None = None
        self._error: RustVLLMError | None = None
        self._is_over = threading.Event()
        self._is_stopping = False
        self._on_death: list[Callable[[], object]] = []
        self._hellos: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self.processes: list[RankProcess | RemoteRank] = []
        self._nodes: list[NodeRanks] = []
        try:
            pass_fds = [writer.fileno(), *(meeting.fileno() for meeting in self._meetings)]
            own = [RankProcess(rank, pass_fds) for rank in range(1, size)]
            self.processes.extend(own)
        except BaseException:
            self.stop(0.0)
            raise
        for process in own:
            name = f"rustvllm-rank-{process.rank}"
            threading.Thread(target=self._hear, args=(process,), name=name, daemon=True).start()

    def add_node(self, node: NodeRanks) -> None:
        """Add the ranks of another machine; call this in the order of nodes."""
        self._nodes.append(node)
        self.processes.extend(node.ranks)
        arguments = (self._hellos.put, self._on_end)
        name = f"rustvllm-node-{node.node_rank}"
        threading.Thread(target=node.listen, args=arguments, name=name, daemon=True).start()

    def tell_nodes(self, failure: str) -> None:
        """Tell the other machines why all ranks end."""
        for node in self._nodes:
            nodes.say(node.link, failed=failure)

    def order(self, order: Mapping[str, Any], host: str | None = None) -> None:
        """Send every rank the same order, with the rank's own number.

        Args:
            order: The order. Nodes add their own values to the first one.
            host: This machine's address, if there are other nodes.
        """
        for process in self.processes:
            own = self._own_order if "config" in order and isinstance(process, RankProcess) else {}
            if own and host is not None:
                own = own | {"own_host": host}
            process.order({**order, **own, "rank": process.rank, **({"seat": process.rank} if own else {})})

    def wait_for_hellos(self, seconds: float) -> None:
        """Wait until every rank has said that it joins.

        Raises:
            ModelLoadError: A rank did not join in time.
            RustVLLMError: The error that a rank raised.
            DeviceFailedError: A rank has ended.
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
        """Call ``on_death``, in any thread, once a rank has ended."""
        with self._lock:
            self._on_death.append(on_death)
            is_dead = self._death is not None
        if is_dead:
            on_death()

    @property
    def death(self) -> str | None:
        """Which rank ended first, and why; None if all run."""
        return self._death

    @property
    def is_stopping(self) -> bool:
        """Whether the ranks are being stopped."""
        return self._is_stopping

    def check(self, seconds: float = 0.0) -> None:
        """Raise if a rank has ended. With ``seconds``, wait that long for an end that another error points to.

        Raises:
            DeviceFailedError: Names the rank, and why it ended.
            RustVLLMError: The error that the rank raised during its start.
        """
        if not self._is_over.wait(seconds) if seconds else self._death is None:
            return
        if self._error is not None:
            raise self._error
        if self._death is not None:
            raise DeviceFailedError(self._death)

    def stop(self, seconds: float = _END_SECONDS) -> None:
        """End every process; after ``seconds``, the remaining ones are killed."""
        with self._lock:
            self._is_stopping = True
        if seconds:
            for node in self._nodes:
                nodes.say(node.link, end=True)
        deadline = time.monotonic() + seconds
        for process in self.processes:
            if not process.wait(max(0.0, deadline - time.monotonic())):
                process.kill()
        for process in self.processes:
            process.close()
        for node in self._nodes:
            node.link.close()

    def _hear(self, process: RankProcess) -> None:
        with contextlib.suppress(OSError, ValueError):  # the pipe was closed
            process.listen(self._hellos.put)
        self._on_end(process)

    def _on_end(self, process: RankProcess | RemoteRank) -> None:
        with self._lock:
            if self._is_stopping or self._death is not None:
                return
            self._error, self._death = process.error, process.end_in_words
            callbacks = list(self._on_death)
        logger.error("%s; the other ranks end with it", self._death)
        self.tell_nodes(self._death)
        self._writer.give_up()
        for meeting in self._meetings:
            meeting.give_up()
        # A rank that waits for the dead one in torch's collectives notices only when all connections are gone.
        for other in self.processes:
            if other is not process:
                other.signal(signal.SIGKILL)
        self._is_over.set()
        self._hellos.put(None)
        for callback in callbacks:
            callback()


def state_of(pid: int) -> str:
    """A process's state, according to the kernel: ``running``, ``sleeping``, ``stopped``, ``gone`` and others."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return "gone"
    letter = text.rpartition(")")[2].split()[:1]
    names = {"R": "running", "S": "sleeping", "T": "stopped", "t": "stopped by a debugger", "D": "waiting for a disk"}
    return names.get(letter[0] if letter else "", "gone")
