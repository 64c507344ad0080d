"""``NodeRanks``: the ranks of another node as the head sees them, through the connection to that node."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rustvllm.distributed import nodes
from rustvllm.executor.rank_end import end_in_words, place_of
from rustvllm.logger import init_logger
from rustvllm.process.child import as_exception

if TYPE_CHECKING:
    from rustvllm import _core
    from rustvllm.exceptions import RustVLLMError

logger = init_logger(__name__)

_KILL_SECONDS = 2.0
"""For a node to say that it has killed a rank, before its connection is cut, which has the same effect there."""
_STACK_SECONDS = 3.0
_LISTEN_SECONDS = 3600.0


class RemoteRank:
    """A rank's process on another node; what ``RankProcess`` is for one of this machine.

    Args:
        rank: Of the world.
        node: Where it is.

    Attributes:
        rank: As given.
        node_rank: Of its machine.
        pid: There; 0: it has not been started.
        state: What the kernel there says of it.
        error: What it raised, if it could say so.
        death: Why it ended, in its own words.
    """

    def __init__(self, rank: int, node: NodeRanks) -> None:
        self.rank, self._node, self.node_rank = rank, node, node.node_rank
        self.pid = 0
        self.state = "running"
        self.error: RustVLLMError | None = None
        self.death: str | None = None
        self._end: str | None = None
        self._stacks: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._has_ended = threading.Event()

    @property
    def place(self) -> str:
        """How messages name it."""
        return place_of(self.rank, self.node_rank, self.pid)

    @property
    def end_in_words(self) -> str:
        """Who ended and why."""
        return end_in_words(self.place, self.error, self.death, self._end or "in a way that is not known")

    def order(self, order: Mapping[str, Any]) -> None:
        """Send one order."""
        nodes.say(self._node.link, rank=self.rank, order=order)

    def signal(self, number: int) -> None:
        """Have the node send a signal."""
        nodes.say(self._node.link, rank=self.rank, signal=number)

    def stack(self) -> str:
        """Its Python stack, by its node."""
        nodes.say(self._node.link, rank=self.rank, stack=True)
        try:
            return self._stacks.get(timeout=_STACK_SECONDS)
        except queue.Empty:
            return f"unknown: its node has not said it within {_STACK_SECONDS:g} s"

    def wait(self, timeout: float | None = None) -> bool:
        """Wait so many seconds for its end; whether it has come."""
        return self._has_ended.wait(timeout)

    def kill(self) -> None:
        """End it at once: by its node, or with its node's connection."""
        self.signal(signal.SIGKILL)
        if not self._has_ended.wait(_KILL_SECONDS):
            self._node.link.cut()

    def close(self) -> None:
        """Nothing is held for it here."""

    def hear(self, text: Mapping[str, Any], on_hello: Callable[[int], object]) -> bool:
        """What its node says of it; whether it has ended."""
        self.pid = text.get("pid", self.pid)
        self.state = text.get("state", self.state)
        if "stack" in text:
            self._stacks.put(text["stack"])
        says = text.get("says", {})
        if "ready" in says:
            on_hello(self.rank)
        self.death = says.get("death", self.death)
        if (error := says.get("error")) is not None:
            self.error = as_exception(f"worker rank {self.rank}", error)
        if "ended" in text:
            self.note_end(text["ended"])
        return "ended" in text

    def note_end(self, end: str) -> None:
        """It has ended, in these words."""
        if not self._has_ended.is_set():
            self._end, self.state = end, "gone"
            self._has_ended.set()


class NodeRanks:
    """All ranks of one node.

    Args:
        link: To it.
        share: Which ranks it has.
        name: What messages call it: host and process as well.

    Attributes:
        link: As given.
        node_rank: Of the machine.
        ranks: In order.
    """

    def __init__(self, link: _core.NodeLink, share: nodes.NodeShare, name: str) -> None:
        self.link, self._name = link, name
        self.node_rank = share.node_rank
        self.ranks = [RemoteRank(rank, self) for rank in share.ranks]
        self._by_number = {rank.rank: rank for rank in self.ranks}

    def listen(self, on_hello: Callable[[int], object], on_end: Callable[[RemoteRank], object]) -> None:
        """Hear what the node says until its connection has ended."""
        left = None
        try:
            while True:
                text = nodes.hear(self.link, _LISTEN_SECONDS)
                if text is None:
                    continue
                left = text.get("leaves", left)
                rank = self._by_number.get(text.get("rank", 0))
                if rank is not None and rank.hear(text, on_hello):
                    on_end(rank)
        except (ConnectionError, ValueError) as error:
            why = left or f"the connection to it has ended ({error})"
            for rank in self.ranks:
                rank.note_end(f"with its node: {self._name} {why}" if left else f"with its node, {self._name}: {why}")
                on_end(rank)
