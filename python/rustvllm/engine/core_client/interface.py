"""What a front end needs of an engine, wherever that runs: the interfaces of all clients."""

from typing import Final, Protocol

from rustvllm import _core
from rustvllm.process.health import EngineHealth

SHUT_DOWN: Final = "this engine was shut down; make a new one"
"""The error of a client that is used after its ``shutdown``."""


class EngineCoreClient(Protocol):
    """What a front end needs of an engine, wherever that runs."""

    num_blocks: int

    @property
    def max_model_len(self) -> int:
        """What the engine settled on, which may be less than it was asked for."""

    @property
    def handle(self) -> _core.EngineHandle | _core.EngineClient:
        """Takes requests and aborts, gives outputs and counters."""

    @property
    def last_step_error(self) -> str | None:
        """What the last failed step raised."""

    def check_alive(self) -> None:
        """Raise EngineDeadError when the engine has stopped."""

    def shutdown(self) -> None:
        """Stop the engine; calling it again does nothing."""


class AsyncEngineClient(EngineCoreClient, Protocol):
    """An engine that runs by itself: in a thread, in a child process, or in a process started elsewhere."""

    @property
    def errored(self) -> bool:
        """True when the engine ended without a shutdown."""

    def wait_until_ready(self) -> None:
        """Wait until it serves."""

    def health(self) -> list[EngineHealth]:
        """How it is, as far as is known without asking; one entry per engine."""

    def query(self, rank: int, kind: str, payload: bytes, timeout: float) -> bytes:
        """Ask the thread that steps one of its engines; blocks."""

    def stop(self) -> None:
        """Tell it to end, or leave it; waits for nothing."""
