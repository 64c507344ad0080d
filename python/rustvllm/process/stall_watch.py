""":class:`StallWatch`: decides which engines have been silent for so long that they count as dead."""

import time
from collections.abc import Sequence

from rustvllm.process.health import EngineHealth

STALLS_TO_DEATH = 2.0
"""With ``--stall-action end``, an engine counts as dead after this many stall timeouts of silence."""
_LONGEST_LOOK = 1.0
"""Most seconds that one call of ``look`` adds to an engine's silence."""


class StallWatch:
    """Measures for how long engines have been silent while this process was watching.

    The age of a heartbeat alone is not enough: if this process was stopped, or the machine asleep, healthy engines have
    old heartbeats for a moment afterwards. So one look adds at most a second to an engine's silence.

    Args:
        stall_timeout: Seconds after which a silent engine is reported; more than 0.
    """

    def __init__(self, stall_timeout: float) -> None:
        self._stall_timeout = stall_timeout
        self._silent: dict[int, float] = {}
        self._looked: float | None = None

    def look(self, engines: Sequence[EngineHealth], now: float | None = None) -> dict[int, str]:
        """Return the engines that count as dead from now on, with the reason, by rank. Call it several times a second.

        Args:
            engines: The health of all engines; those that are dead already are skipped.
            now: Monotonic time in seconds, for tests; None: the current time.
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
