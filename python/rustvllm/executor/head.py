"""``Head``: accepts the other nodes of a model and compares their facts with its own before anything loads.

It listens for as long as the engine lives, so that a node that comes too late is refused at once.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rustvllm import _core
from rustvllm.distributed import nodes
from rustvllm.distributed.facts import node_difference
from rustvllm.exceptions import ConfigError, ModelLoadError, RustVLLMError
from rustvllm.executor.node_ranks import NodeRanks
from rustvllm.logger import init_logger

if TYPE_CHECKING:
    from rustvllm.config import ParallelConfig

logger = init_logger(__name__)

_COMPLAINT_SECONDS = 5.0
"""How long the head waits for nodes before it logs that it waits."""
_MOST_AT_ONCE = 16
"""The most connections whose other side has not yet said who it is."""


class Head:
    """Begins to listen when it is made.

    Args:
        parallel: Says how many nodes there are, and where this one listens.
        secret: The secret that each side must know.
        facts: The facts of this node by name (``facts.node_facts``).
        takes_any_port: Whether any free port will do, because the other nodes are given the port.

    Attributes:
        host: The address that it listens on.
        port: The port that it listens on.
        nnodes: How many nodes there are, including this one.

    Raises:
        ConfigError: The address does not belong to this machine, or the port is taken.
    """

    def __init__(
        self, parallel: ParallelConfig, secret: bytes, facts: Mapping[str, str], *, takes_any_port: bool = False
    ) -> None:
        self._parallel, self._secret, self._facts = parallel, secret, dict(facts)
        self._name = nodes.own_name(0)
        self.host = nodes.resolve(parallel.master_addr)
        self._lock = threading.Lock()
        self._taken: dict[int, str] = {}
        self._news: queue.SimpleQueue[tuple[int, _core.NodeLink] | RustVLLMError] = queue.SimpleQueue()
        self._slots = threading.BoundedSemaphore(_MOST_AT_ONCE)
        self._listener = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((self.host, 0 if takes_any_port else parallel.master_port))
            self._listener.listen()
        except OSError as error:
            self._listener.close()
            raise ConfigError(
                f"the head cannot listen for other nodes on {self.host} port {parallel.master_port} (master_addr, "
                f"master_port): {error.strerror or error}"
            ) from error
        self.nnodes = parallel.nnodes
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="rustvllm-head", daemon=True).start()

    def wait(self, seconds: float) -> list[NodeRanks]:
        """Wait until every other node has come with the same facts as this one; returns them in order.

        Raises:
            ModelLoadError: A node did not come.
            ConfigError: A node has different facts.
        """
        links: dict[int, _core.NodeLink] = {}
        began = time.monotonic()
        has_complained = False
        while len(links) < self._parallel.nnodes - 1:
            waited = time.monotonic() - began
            missing = [rank for rank in range(1, self._parallel.nnodes) if rank not in links]
            which = f"node{'' if len(missing) == 1 else 's'} {', '.join(map(str, missing))}"
            if waited >= seconds:
                raise ModelLoadError(
                    f"{which} of {self._parallel.nnodes} did not come to {self._name} at {self.host} port {self.port} "
                    f"within {seconds:g} s: start the same command line there with --node-rank and --headless, and "
                    "check its log"
                )
            if waited >= _COMPLAINT_SECONDS and not has_complained:
                has_complained = True
                logger.warning("%s waits for %s at %s port %d", self._name, which, self.host, self.port)
            with contextlib.suppress(queue.Empty):
                news = self._news.get(timeout=min(seconds - waited, _COMPLAINT_SECONDS))
                if isinstance(news, RustVLLMError):
                    for link in links.values():
                        nodes.say(link, refused=str(news))
                        link.close()
                    raise news
                links[news[0]] = news[1]
        parallel = self._parallel
        return [
            NodeRanks(
                links[rank],
                nodes.NodeShare(rank, parallel.nnodes, parallel.tensor_parallel_size, parallel.pipeline_parallel_size),
                self._taken[rank],
            )
            for rank in sorted(links)
        ]

    def close(self) -> None:
        """Stop listening."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError:
                return  # it was closed
            if not self._slots.acquire(blocking=False):
                connection.close()
                continue
            peer = f"{address[0]} port {address[1]}"
            threading.Thread(target=self._greet, args=(connection, peer), name="rustvllm-greet", daemon=True).start()

    def _greet(self, connection: socket.socket, peer: str) -> None:
        try:
            with connection:
                link = _core.NodeLink.welcome(connection.fileno(), self._secret, nodes.HANDSHAKE_SECONDS)
            hello = nodes.hear(link, nodes.HANDSHAKE_SECONDS)
            if hello is None:
                raise TimeoutError(f"it did not say which node it is within {nodes.HANDSHAKE_SECONDS:g} s")
            self._judge(link, hello["hello"])
        except (OSError, ValueError, KeyError) as error:
            logger.warning("%s rejects the connection from %s, which is not a valid node: %s", self._name, peer, error)
        finally:
            self._slots.release()

    def _judge(self, link: _core.NodeLink, hello: Mapping[str, Any]) -> None:
        rank = int(hello["node_rank"])
        name = nodes.name_of(rank, hello["host"], hello["pid"])
        unlike = node_difference(hello["facts"], name, self._facts, self._name)
        if unlike is None and not 1 <= rank < self._parallel.nnodes:
            unlike = f"{name} has node_rank {rank}, but {self._name} waits for 1 to {self._parallel.nnodes - 1}"
        if unlike is not None:
            nodes.say(link, refused=unlike)
            link.close()
            self._news.put(ConfigError(unlike))
            return
        with self._lock:
            before = self._taken.setdefault(rank, name)
        if before != name:
            twice = f"{name} cannot join {self._name}: {before} has joined as node {rank} already; start each node once"
            logger.warning("%s", twice)
            nodes.say(link, refused=twice)
            link.close()
            return
        self._news.put((rank, link))
