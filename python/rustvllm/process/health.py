"""The health of an engine, as its front end knows it without asking the engine."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from rustvllm import _core


@dataclass(frozen=True)
class EngineHealth:
    """The health of one engine.

    Attributes:
        rank: Number of the engine, from 0.
        death: Why it is dead; None while it lives.
        heartbeat_age: Seconds since the last heartbeat of its process; 0.0 for an engine in this process.
        step_age: Seconds since its last step while it has requests; 0.0 when idle, or paused and at rest.
    """

    rank: int
    death: str | None
    heartbeat_age: float
    step_age: float

    @property
    def stalled_for(self) -> float:
        """Seconds without a sign of life: the larger of the two ages."""
        return max(self.heartbeat_age, self.step_age)


def health_of(client: _core.EngineClient) -> list[EngineHealth]:
    """The health of every engine of a client, from their last heartbeats."""
    found = (client.engine_health(rank) for rank in range(client.num_engines))
    return [
        EngineHealth(rank, each["death"], each["last_heartbeat_age"], each["step_age"])
        for rank, each in enumerate(found)
    ]


class StepWatch:
    """Measures for how long an engine of this process has had requests without finishing a step.

    It only notices a step when :meth:`step_age` is called, so its precision is the interval between two calls.
    """

    def __init__(self) -> None:
        self._last_step = -1
        self._since = time.monotonic()

    def step_age(self, stats: Mapping[str, int | float]) -> float:
        """Seconds since the last step that an earlier call noticed; 0.0 when idle.

        Args:
            stats: The result of ``EngineHandle.stats``.
        """
        now = time.monotonic()
        is_busy = stats["num_running"] + stats["num_waiting"] + stats["num_queued"] > 0
        if stats["is_paused"]:
            is_busy = stats["last_updated_step"] < stats["num_steps"]
        if not is_busy or stats["last_updated_step"] != self._last_step:
            self._last_step, self._since = int(stats["last_updated_step"]), now
        return now - self._since
