"""Nodes: which ranks each machine has, and the messages between the head and the other nodes, apart from steps.

Messages are JSON objects, sent over a connection whose ends have proved that they know the secret (``_core.NodeLink``).

| from | fields | meaning |
|---|---|---|
| node | ``hello``: node_rank, host, pid, facts | the node's first message |
| head | ``refused`` | why the head refuses the node; the connection ends |
| head | ``taken``: ranks, nnodes, device | the ranks that the node starts, the number of nodes, and the device type |
| head | ``rank``, ``order`` | an order for a rank's standard input |
| head | ``rank``, ``signal`` | a signal to send to a rank's process |
| head | ``rank``, ``stack`` | asks for a rank's Python stack |
| head | ``failed`` | why the node must end its ranks now |
| head | ``end`` | the node waits for its ranks to end by themselves, then kills the rest |
| node | ``rank``, ``pid`` | the rank's process has been started |
| node | ``rank``, ``says`` | what a rank wrote to its pipe |
| node | ``rank``, ``state`` | the new state of a rank's process (running and sleeping count as one) |
| node | ``rank``, ``stack`` | a rank's Python stack |
| node | ``rank``, ``ended`` | how a rank's process ended |
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
"""How long the handshake of a node and the head may take once they are connected."""


@dataclass(frozen=True, slots=True)
class NodeShare:
    """The ranks of one node. The head is node 0 and has the first ranks.

    Attributes:
        node_rank: Number of the node, from 0.
        nnodes: Number of nodes.
        tensor_size: Number of ranks that share each layer.
        num_stages: Number of pipeline stages (groups of layers).
    """

    node_rank: int
    nnodes: int
    tensor_size: int
    num_stages: int

    @property
    def ranks(self) -> range:
        """The consecutive ranks of the world that this node starts."""
        each = self.tensor_size * self.num_stages // self.nnodes
        return range(self.node_rank * each, (self.node_rank + 1) * each)

    @property
    def own_stages(self) -> list[int]:
        """Stages with all their ranks on this node. They add in shared memory; other stages use the network."""
        ranks = self.ranks
        found = []
        for stage in range(self.num_stages):
            first = (self.num_stages - 1 - stage) * self.tensor_size
            if first in ranks and first + self.tensor_size - 1 in ranks:
                found.append(stage)
        return found


def name_of(node_rank: int, host: str, pid: int) -> str:
    """A node's name in messages, with the host and process id of its main process."""
    return f"node {node_rank} ({host}, pid {pid})"


def own_name(node_rank: int) -> str:
    """This node's name in messages."""
    return name_of(node_rank, socket.gethostname(), os.getpid())


def say(link: _core.NodeLink, **what: Any) -> None:
    """Send a message. A broken connection is no error here: ``hear`` reports it."""
    try:
        link.send(json.dumps(what))
    except ConnectionError:
        return


def hear(link: _core.NodeLink, seconds: float) -> dict[str, Any] | None:
    """Wait at most ``seconds`` for the next message; None if none came.

    Raises:
        ConnectionError: The connection has ended; says why.
    """
    text = link.receive(seconds)
    if text is None:
        return None
    found: dict[str, Any] = json.loads(text)
    return found


def resolve(host: str) -> str:
    """Resolve a host name to an IP address: the system's first choice if there are several.

    Raises:
        ConfigError: The name cannot be resolved.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot resolve master_addr {host}: {error}") from error
    return str(found[0][4][0])
