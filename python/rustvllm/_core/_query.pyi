"""Type of the questions to an engine in ``rustvllm._core``, where it is found; there is no module of this name."""

from typing import final

@final
class EngineQuery:
    """A question of a client. Dropped without an answer, it tells its client so."""

    @property
    def kind(self) -> str: ...
    @property
    def payload(self) -> bytes: ...
    def answer(self, answer: bytes) -> None:
        """Give the answer, of at most 8 MiB; SchedulerStateError for a second one."""
    def fail(self, message: str) -> None:
        """Say why there is none."""
