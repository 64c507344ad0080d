""":class:`DrainRate`: measures how fast requests leave the waiting queue, to say when to send a refused one again."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping

WINDOW = 10.0
"""The most seconds over which a rate is measured."""
MAX_RETRY_AFTER = 60
"""The longest advised wait in seconds: a longer forecast would be a guess."""
_INTERVAL = 0.25
"""Seconds between two readings of the counters."""


class DrainRate:
    """Remembers the engine's counters over the last seconds. Used by one thread.

    The engine counts the requests, and their tokens, that it schedules for the first time; this class only reads.
    """

    def __init__(self, stats: Callable[[], Mapping[str, float]], clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without readings.

        Args:
            stats: Returns the scheduler's counters, like ``EngineHandle.stats``.
            clock: Returns the time in seconds.
        """
        self._stats = stats
        self._clock = clock
        self._samples: deque[tuple[float, float, float]] = deque()

    def observe(self) -> None:
        """Read the counters, unless that was done a moment ago. Call this with every request; it is cheap."""
        if not self._samples or self._clock() - self._samples[-1][0] >= _INTERVAL:
            self._sample(self._stats())

    def _sample(self, stats: Mapping[str, float]) -> None:
        now, samples = self._clock(), self._samples
        requests, tokens = stats.get("num_admitted_requests", 0), stats.get("num_admitted_tokens", 0)
        if samples and (requests < samples[-1][1] or tokens < samples[-1][2]):
            samples.clear()  # an engine was restarted
        while samples and now - samples[0][0] > WINDOW:
            samples.popleft()
        samples.append((now, requests, tokens))

    def retry_after(self) -> int:
        """Seconds until what is waiting now will be scheduled, at the rate of the last seconds: from 1 to 60.

        This is waiting requests over requests per second, or waiting tokens over tokens per second if that is longer.
        If no request has left since the first reading, it assumes that one has.
        """
        stats = self._stats()
        self._sample(stats)
        (began, requests, tokens), (now, requests_now, tokens_now) = self._samples[0], self._samples[-1]
        elapsed = now - began
        seconds = stats.get("num_queued", 0) * elapsed / max(requests_now - requests, 1)
        if tokens_now > tokens:
            seconds = max(seconds, stats.get("num_queued_tokens", 0) * elapsed / (tokens_now - tokens))
        return min(max(math.ceil(round(seconds, 3)), 1), MAX_RETRY_AFTER)
