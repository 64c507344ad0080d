""":class:`StallWatch`: which engines have been silent for so long that they count as dead."""

import time
from collections.abc import Sequence

from rustvllm.process.health import EngineHealth

STALLS_TO_DEATH = 2.0
"""After so many stall timeouts a silent engine counts as dead, where a silent engine is to be ended."""
_LONGEST_LOOK = 1.0
"""Seconds that one look counts for at most."""


class StallWatch:
    """Counts for how long engines have been silent while this process looked.

    An engine's own account may be wrong by as long as this process was stopped, or the machine asleep: on waking, an
    engine that runs again has an old heartbeat for a moment. So no look counts for more than a second.

    Args:
        stall_timeout: Seconds after which a silent engine is reported; more than 0.
    """

    def __init__(self, stall_timeout: float) -> None:
        self._stall_timeout = stall_timeout
        self._silent: dict[int, float] = {}
        self._looked: float | None = None

    def look(self, engines: Sequence[EngineHealth], now: float | None = None) -> dict[int, str]:
        """The engines that count as dead from now on, by rank, and why; called some times a second.

        Args:
            engines: Those that are dead already are passed over.
            now: On the monotonic clock, for tests.
        """
        now = time.monotonic() if now is None else now
        counts = 0.0 if self._looked is None else min(now - self._looked, _LONGEST_LOOK)
        self._looked = now
        living = [engine for engine in engines if engine.death is None]
        self._silent = {
            engine.rank: min(engine.stalled_for, self._silent.get(engine.rank, 0.0) + counts) for engine in living
        }
        limit = STALLS_TO_DEATH * self._stall_timeout
        return {rank: self._why(rank, silent) for rank, silent in self._silent.items() if silent > limit}

    def _why(self, rank: int, silent: float) -> str:
        return (
            f"engine {rank} has shown no sign of life for {silent:.1f} s, twice the stall timeout "
            f"(--stall-timeout {self._stall_timeout:g}, --stall-action end), and counts as dead"
        )
