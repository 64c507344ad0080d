"""``NodeRanks``: another node's ranks, as the head sees them through the connection to that node."""

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
"""How long a node may take to confirm that it killed a rank; then its connection is cut, which also ends the rank."""
_STACK_SECONDS = 3.0
_LISTEN_SECONDS = 3600.0


class RemoteRank:
    """A rank's process on another node; the counterpart of ``RankProcess``.

    Args:
        rank: Its number among all ranks.
        node: The ranks of its node.

    Attributes:
        rank: As given.
        node_rank: The number of its node.
        pid: Its process id on that node; 0 if it has not been started.
        state: Its state, according to the kernel of that node.
        error: The error that it raised, if it could report one.
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
        """Its name in messages."""
        return place_of(self.rank, self.node_rank, self.pid)

    @property
    def end_in_words(self) -> str:
        """Which rank ended, and why."""
        return end_in_words(self.place, self.error, self.death, self._end or "in a way that is not known")

    def order(self, order: Mapping[str, Any]) -> None:
        """Send one order."""
        nodes.say(self._node.link, rank=self.rank, order=order)

    def signal(self, number: int) -> None:
        """Make its node send a signal to it."""
        nodes.say(self._node.link, rank=self.rank, signal=number)

    def stack(self) -> str:
        """Its Python stack, as its node reports it."""
        nodes.say(self._node.link, rank=self.rank, stack=True)
        try:
            return self._stacks.get(timeout=_STACK_SECONDS)
        except queue.Empty:
            return f"unknown: its node has not said it within {_STACK_SECONDS:g} s"

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most ``timeout`` seconds for its end; returns whether it has ended."""
        return self._has_ended.wait(timeout)

    def kill(self) -> None:
        """End it at once: through its node, else by cutting its node's connection."""
        self.signal(signal.SIGKILL)
        if not self._has_ended.wait(_KILL_SECONDS):
            self._node.link.cut()

    def close(self) -> None:
        """Do nothing: this machine keeps no resources for it."""

    def hear(self, text: Mapping[str, Any], on_hello: Callable[[int], object]) -> bool:
        """Process a message of its node about it; returns whether it has ended."""
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
        """Record that it has ended, and how."""
        if not self._has_ended.is_set():
            self._end, self.state = end, "gone"
            self._has_ended.set()


class NodeRanks:
    """All ranks of one node.

    Args:
        link: The connection to the node.
        share: The ranks that the node has.
        name: The node's name in messages, with host and process.

    Attributes:
        link: As given.
        node_rank: The node's number.
        ranks: Its ranks in order.
    """

    def __init__(self, link: _core.NodeLink, share: nodes.NodeShare, name: str) -> None:
        self.link, self._name = link, name
        self.node_rank = share.node_rank
        self.ranks = [RemoteRank(rank, self) for rank in share.ranks]
        self._by_number = {rank.rank: rank for rank in self.ranks}

    def listen(self, on_hello: Callable[[int], object], on_end: Callable[[RemoteRank], object]) -> None:
        """Process the node's messages until its connection ends."""
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
