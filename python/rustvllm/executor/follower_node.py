"""``FollowerNode``: a machine that runs some ranks of a model whose engine runs on another machine, the head.

It connects to the head, starts the processes that the head wants, passes the head's orders to them, and passes their
messages back. Steps go into this node's own channel without passing through Python. It makes no decisions and imports
no torch.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

from rustvllm import _core
from rustvllm.distributed import meetings, nodes
from rustvllm.exceptions import ConfigError, EngineDeadError, ModelLoadError
from rustvllm.executor.ranks import RankProcess
from rustvllm.logger import init_logger

if TYPE_CHECKING:
    from rustvllm.config import EngineConfig

logger = init_logger(__name__)

_RETRY_SECONDS = 0.5
_COMPLAINT_SECONDS = 5.0
_LOOK_SECONDS = 0.5
_END_SECONDS = 5.0
"""How long ranks have to end by themselves; then they are killed."""


class FollowerNode:
    """One follower node, from its connection to its end; call ``run`` once.

    Args:
        config: The configuration from this node's own flags. Ranks are built from the head's configuration.
        facts: The facts of this node (``facts.node_facts``).
        secret: The secret that both sides must know.
        say: Reports to the user what this node does.
        why_stop: Asked every half second whether this node should end: returns the reason for the head, or None.
    """

    def __init__(
        self,
        config: EngineConfig,
        facts: Mapping[str, str],
        secret: bytes,
        say: Callable[[str], object],
        why_stop: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._config, self._facts, self._secret, self._say = config, dict(facts), secret, say
        self._parallel = config.parallel
        self._name = nodes.own_name(config.parallel.node_rank)
        self._head = f"the head (node 0) at {config.parallel.master_addr} port {config.parallel.master_port}"
        self._processes: dict[int, RankProcess] = {}
        self._own: dict[str, Any] = {}
        self._why_stop = why_stop

    def run(self, seconds: float) -> None:
        """Follow the head until it ends.

        Args:
            seconds: How long to wait for the head to appear.

        Raises:
            ConfigError: The head refuses this node, or the two have different secrets.
            ModelLoadError: There is no head.
            EngineDeadError: The head or a rank ended without a shutdown.
        """
        link = self._connect(seconds)
        if link is None:
            return
        try:
            self._say_hello(link)
            self._follow(link)
        finally:
            link.give_up()
            link.cut()

    def _connect(self, seconds: float) -> _core.NodeLink | None:
        """Connect to the head; None if this node was stopped.

        A connection that breaks before the head has proved that it knows the secret is tried again: it may be that of
        an earlier engine that is about to end.
        """
        began, has_complained = time.monotonic(), False
        address = (nodes.resolve(self._parallel.master_addr), self._parallel.master_port)
        while self._why_stop() is None:
            waited = time.monotonic() - began
            try:
                return self._attempt(address, max(0.1, min(5.0, seconds - waited)))
            except OSError as error:
                why = error.strerror or str(error)
            if waited >= seconds:
                raise ModelLoadError(
                    f"{self._name} could not reach {self._head} within {seconds:g} s ({why}): start it, and check its "
                    "log"
                )
            if waited >= _COMPLAINT_SECONDS and not has_complained:
                has_complained = True
                logger.warning("%s waits for %s: %s", self._name, self._head, why)
            time.sleep(_RETRY_SECONDS)
        return None

    def _attempt(self, address: tuple[str, int], seconds: float) -> _core.NodeLink | None:
        """One try to connect, in a thread of its own, as both parts wait for the head. None if this node was stopped.

        Args:
            address: Of the head.
            seconds: How long the connection itself may take; the handshake has a limit of its own.
        """
        connections: list[socket.socket] = []
        is_stopped = threading.Event()
        done: Future[_core.NodeLink | None] = Future()

        def run() -> None:
            try:
                with socket.create_connection(address, timeout=seconds) as connection:
                    connections.append(connection)
                    done.set_result(None if is_stopped.is_set() else self._prove(connection))
            except BaseException as error:  # noqa: BLE001 -- raised where it is waited for
                done.set_exception(error)

        thread = threading.Thread(target=run, name="rustvllm-connect", daemon=True)
        thread.start()
        while self._why_stop() is None:
            if wait([done], _LOOK_SECONDS).done:
                return done.result()
        is_stopped.set()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join()  # the handshake fails at once
        return None

    def _prove(self, connection: socket.socket) -> _core.NodeLink:
        try:
            return _core.NodeLink.prove(connection.fileno(), self._secret, nodes.HANDSHAKE_SECONDS)
        except PermissionError as error:
            raise ConfigError(
                f"{self._name} and {self._head} have different secrets: give both the same RUSTVLLM_ENGINE_SECRET or "
                "--engine-secret-file"
            ) from error
        except ValueError as error:
            raise ModelLoadError(f"{self._name} cannot join {self._head}: {error}") from error

    def _say_hello(self, link: _core.NodeLink) -> None:
        hello = {
            "node_rank": self._parallel.node_rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "facts": self._facts,
        }
        nodes.say(link, hello=hello)
        self._say(f"{self._name} has joined {self._head}")

    def _follow(self, link: _core.NodeLink) -> None:
        taken = self._wait_until_taken(link)
        if taken is None:
            return
        ranks, device = taken["ranks"], taken["device"]
        parallel = self._parallel
        share = nodes.NodeShare(
            parallel.node_rank, taken["nnodes"], parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        )
        channel_fd = link.follow(len(ranks))
        places = meetings.make_meetings(share, device)
        meeting_fds = {str(stage): meeting.fileno() for stage, meeting in places.items()}
        self._own = {
            "channel_fd": channel_fd,
            "meeting_fds": meeting_fds,
            "num_neighbours": len(ranks),
            "own_host": link.own_host,
        }
        pass_fds = [channel_fd, *meeting_fds.values()]
        try:
            for rank in ranks:
                self._processes[rank] = RankProcess(rank, pass_fds, parallel.node_rank)
                nodes.say(link, rank=rank, pid=self._processes[rank].pid)
            for process in self._processes.values():
                name = f"rustvllm-rank-{process.rank}"
                threading.Thread(target=self._hear, args=(process, link), name=name, daemon=True).start()
            pids = ", ".join(str(process.pid) for process in self._processes.values())
            which = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
            self._say(f"{self._name} holds {which} (pid {pids})")
            self._obey(link)
        finally:
            for meeting in places.values():
                meeting.give_up()
            self._end_ranks(0.0)

    def _wait_until_taken(self, link: _core.NodeLink) -> dict[str, Any] | None:
        """The ranks that the head wants from this node; it may wait for other nodes first. None if stopped."""
        try:
            while self._why_stop() is None:
                text = nodes.hear(link, _LOOK_SECONDS)
                if text is None:
                    continue
                if (why := text.get("refused")) is not None:
                    raise ConfigError(f"{self._head} refuses this node: {why}")
                if (taken := text.get("taken")) is not None:
                    found: dict[str, Any] = taken
                    return found
        except ConnectionError as error:
            raise EngineDeadError(f"{self._head} ended before all nodes had joined ({error})") from error
        return None

    def _obey(self, link: _core.NodeLink) -> None:
        """Do what the head says until it ends.

        Raises:
            EngineDeadError: The head or a rank ended without a shutdown.
        """
        states = dict.fromkeys(self._processes, "running")
        try:
            while self._why_stop() is None:
                text = nodes.hear(link, _LOOK_SECONDS)
                if text is None:
                    self._tell_states(link, states)
                elif text.get("end"):
                    self._end_ranks(_END_SECONDS)
                    return
                elif (failure := text.get("failed")) is not None:
                    raise EngineDeadError(f"{self._head} has ended: {failure}; the ranks of {self._name} end with it")
                elif (process := self._processes.get(text.get("rank", 0))) is not None:
                    if "order" in text:
                        process.order(self._localised(text["order"], process.rank))
                    if text.get("stack"):
                        nodes.say(link, rank=process.rank, stack=process.stack())
                    if "signal" in text:
                        process.signal(text["signal"])
        except ConnectionError as error:
            raise EngineDeadError(
                f"{self._head} has ended or can no longer be reached ({error}); the ranks of {self._name} end with it"
            ) from error
        nodes.say(link, leaves=self._why_stop())
        link.close()

    def _tell_states(self, link: _core.NodeLink, states: dict[int, str]) -> None:
        """Report ranks that are newly stopped or ended; running and sleeping count as one state, as they alternate."""
        for rank, process in self._processes.items():
            state = process.state
            state = "running" if state == "sleeping" else state
            if state != states[rank]:
                states[rank] = state
                nodes.say(link, rank=rank, state=state)

    def _localised(self, order: Mapping[str, Any], rank: int) -> dict[str, Any]:
        """A rank's order with this node's own values filled in."""
        found = dict(order)
        if "config" in found:
            first = min(self._processes)
            found |= self._own | {"seat": rank - first + 1}
            config = dict(found["config"])
            config["model"] = dict(config["model"]) | {"path": str(self._config.model.path)}
            found["config"] = config
        return found

    def _hear(self, process: RankProcess, link: _core.NodeLink) -> None:
        """Pass on what a rank says until it has ended."""
        with contextlib.suppress(OSError, ValueError):  # the pipe was closed
            for says in process.said():
                nodes.say(link, rank=process.rank, says=says)
        process.wait()
        nodes.say(link, rank=process.rank, ended=process.end)

    def _end_ranks(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in self._processes.values():
            if not process.wait(max(0.0, deadline - time.monotonic())):
                process.kill()
        for process in self._processes.values():
            process.close()
