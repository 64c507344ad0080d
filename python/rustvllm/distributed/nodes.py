"""Nodes: which ranks each machine has, and what the head and the others say to each other before and beside steps.

Texts are JSON objects, over a connection whose two sides have proved to know the secret (``_core.NodeLink``).

| from | text | meaning |
|---|---|---|
| node | ``hello``: node_rank, host, pid, facts | first of all |
| head | ``refused`` | why it does not take the node; the connection ends |
| head | ``taken``: ranks, stages | which ranks the node starts, and which of them may meet in its memory |
| head | ``rank``, ``order`` | for a rank's standard input |
| head | ``rank``, ``signal`` | to send to a rank's process |
| head | ``rank``, ``stack`` | asks for a rank's Python stack |
| head | ``failed`` | why all ranks end |
| head | ``end`` | the ranks end in good order |
| node | ``rank``, ``pid`` | it has been started |
| node | ``rank``, ``says`` | what a rank said on its pipe |
| node | ``rank``, ``state`` | what the kernel says of its process, whenever that has changed for longer |
| node | ``rank``, ``stack`` | a rank's Python stack |
| node | ``rank``, ``ended`` | how its process ended |
| node | ``leaves`` | why the node ends the connection |
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rustvllm.exceptions import ConfigError

if TYPE_CHECKING:
    from rustvllm import _core

HANDSHAKE_SECONDS = 5.0
"""For a node and the head to know what the other is, once they are connected."""


@dataclass(frozen=True, slots=True)
class NodeShare:
    """The ranks of one node; the head's are the first.

    Attributes:
        node_rank: Of the machine, from 0.
        nnodes: How many there are.
        tensor_size: Ranks that share each layer.
        num_stages: Groups of layers.
    """

    node_rank: int
    nnodes: int
    tensor_size: int
    num_stages: int

    @property
    def ranks(self) -> range:
        """Of the world, in a row."""
        each = self.tensor_size * self.num_stages // self.nnodes
        return range(self.node_rank * each, (self.node_rank + 1) * each)

    @property
    def own_stages(self) -> list[int]:
        """Stages all of whose ranks are on this node: these add in its memory, others over the network."""
        ranks = self.ranks
        found = []
        for stage in range(self.num_stages):
            first = (self.num_stages - 1 - stage) * self.tensor_size
            if first in ranks and first + self.tensor_size - 1 in ranks:
                found.append(stage)
        return found


def name_of(node_rank: int, host: str, pid: int) -> str:
    """What messages call a node, with the process that speaks for it."""
    return f"node {node_rank} ({host}, pid {pid})"


def own_name(node_rank: int) -> str:
    """The same for this machine and process."""
    return name_of(node_rank, socket.gethostname(), os.getpid())


def say(link: _core.NodeLink, **what: Any) -> None:
    """Send a text; what cannot be sent any more is known where texts are received."""
    try:
        link.send(json.dumps(what))
    except ConnectionError:
        return


def hear(link: _core.NodeLink, seconds: float) -> dict[str, Any] | None:
    """The next text, or None when there was none in so many seconds.

    Raises:
        ConnectionError: Why there will be none.
    """
    text = link.receive(seconds)
    if text is None:
        return None
    found: dict[str, Any] = json.loads(text)
    return found


def resolve(host: str) -> str:
    """An address of a name; one of this machine's own choice where there are several.

    Raises:
        ConfigError: It is unknown.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot resolve master_addr {host}: {error}") from error
    return str(found[0][4][0])
