""":class:`StallGuard`: notices that an engine process hangs, for the launcher that can kill it.

The launcher has no part in what engines and API processes say to each other. So that one process decides, and headless
engines are watched too, it becomes a client of its own engines: it asks nothing of them and reads their heartbeats.
"""

import dataclasses
import threading
from collections.abc import Callable

from rustvllm.engine.core_client.remote import SILENT, RemoteClient, probe
from rustvllm.exceptions import EngineDeadError
from rustvllm.logger import init_logger
from rustvllm.process.address import EngineAddress
from rustvllm.process.stall_watch import STALLS_TO_DEATH, StallWatch

logger = init_logger(__name__)

LOOK_SECONDS = 0.25


class StallGuard:
    """Watches one engine in a thread of its own, until that has ended or hangs.

    Args:
        address: Where the engine listens.
        secret: For TCP.
        rank: Which one of several.
        stall_timeout: Seconds after which a silent engine is reported; it counts as dead after twice as many.
        on_stall: Called with why, once, in the thread.
    """

    def __init__(
        self,
        address: EngineAddress,
        secret: bytes | None,
        rank: int,
        stall_timeout: float,
        on_stall: Callable[[str], None],
    ) -> None:
        self._address = address
        self._rank = rank
        self._stall_timeout = stall_timeout
        self._on_stall = on_stall
        self._client = RemoteClient([address], secret, timeout=STALLS_TO_DEATH * stall_timeout)
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name=f"rustvllm-stall-guard-{rank}", daemon=True).start()

    def stop(self) -> None:
        """The engine has ended."""
        self._stopped.set()

    def _run(self) -> None:
        try:
            why = self._watch()
        finally:
            self._client.stop()
        if why is not None and not self._stopped.is_set():
            self._on_stall(why)

    def _watch(self) -> str | None:
        """Wait until the engine hangs, and say why it counts as dead; None when it has ended."""
        while True:
            try:
                self._client.wait_until_ready()
                break
            except EngineDeadError as error:
                if self._stopped.wait(LOOK_SECONDS):
                    return None
                if probe(self._address) == SILENT:
                    return f"engine {self._rank} has not answered since it was ready: {error}"
                logger.warning("cannot watch engine %d yet: %s", self._rank, error)
        watch = StallWatch(self._stall_timeout)
        while not self._stopped.wait(LOOK_SECONDS):
            (health,) = self._client.health()
            if health.death is not None:
                return None
            # The client knows one engine, which is the first to it.
            dead = watch.look([dataclasses.replace(health, rank=self._rank)])
            if dead:
                return dead[self._rank]
        return None
