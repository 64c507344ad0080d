""":class:`DrainRate`: how fast requests leave the waiting queue, to say when a refused one is worth sending again."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping

WINDOW = 10.0
"""Seconds that a rate is measured over, at most."""
MAX_RETRY_AFTER = 60
"""Longest wait that is advised, in seconds: a forecast beyond it would be a guess."""
_INTERVAL = 0.25
"""Seconds between two looks at the counters."""


class DrainRate:
    """Remembers the engine's counters over the last seconds. One thread uses it.

    The engine counts what was scheduled for the first time, in requests and in tokens; nothing is counted here.
    """

    def __init__(self, stats: Callable[[], Mapping[str, float]], clock: Callable[[], float] = time.monotonic) -> None:
        """Know nothing yet.

        Args:
            stats: The scheduler's counters, as ``EngineHandle.stats`` gives them.
            clock: Seconds.
        """
        self._stats = stats
        self._clock = clock
        self._samples: deque[tuple[float, float, float]] = deque()

    def observe(self) -> None:
        """Look at the counters, unless that was done a moment ago. To be called with every request: it costs little."""
        if not self._samples or self._clock() - self._samples[-1][0] >= _INTERVAL:
            self._sample(self._stats())

    def _sample(self, stats: Mapping[str, float]) -> None:
        now, samples = self._clock(), self._samples
        requests, tokens = stats.get("num_admitted_requests", 0), stats.get("num_admitted_tokens", 0)
        if samples and (requests < samples[-1][1] or tokens < samples[-1][2]):
            samples.clear()  # an engine was started anew
        while samples and now - samples[0][0] > WINDOW:
            samples.popleft()
        samples.append((now, requests, tokens))

    def retry_after(self) -> int:
        """Seconds until what waits now will have been scheduled, at the rate of the last seconds: 1 to 60.

        Waiting requests over requests per second, waiting tokens over tokens per second; the longer of the two. When
        nothing has left since the first look, that is taken for "one request in all this time".
        """
        stats = self._stats()
        self._sample(stats)
        (began, requests, tokens), (now, requests_now, tokens_now) = self._samples[0], self._samples[-1]
        elapsed = now - began
        seconds = stats.get("num_queued", 0) * elapsed / max(requests_now - requests, 1)
        if tokens_now > tokens:
            seconds = max(seconds, stats.get("num_queued_tokens", 0) * elapsed / (tokens_now - tokens))
        return min(max(math.ceil(round(seconds, 3)), 1), MAX_RETRY_AFTER)
