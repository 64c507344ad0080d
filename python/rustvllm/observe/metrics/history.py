"""``MetricsHistory``: what engines did during the last hour and the last minute, from their counters.

It has a point for every 15 seconds, with a few numbers per engine, and needs no other readings: percentiles come from
the difference between two readings of a histogram, as Prometheus computes them.
"""

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from rustvllm.observe.metrics.counters import EngineMetrics

INTERVAL_SECONDS: Final = 15.0
"""Seconds between two points."""
MAX_POINTS: Final = 240
"""The number of points in an hour."""
_NUM_READINGS: Final = 5
"""How many readings are kept completely: those of the last minute."""
_LATENCIES: Final = {"ttft": "time_to_first_token", "itl": "inter_token_latency"}
_QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_REFUSALS: Final = ("num_rejected_max_num_queued_reqs", "num_rejected_max_num_queued_tokens", "num_queue_timeouts")
_COUNTS: Final[Mapping[str, Sequence[str]]] = {
    "finished": ("num_finished_stop", "num_finished_length", "num_finished_repetition"),
    "errors": ("num_finished_error",),
    "refused": _REFUSALS,
    "aborted": ("num_finished_abort",),
    "preemptions": ("num_preemptions",),
}
_RATES: Final = {"generation": "num_generation_tokens", "prompt": "num_prompt_tokens"}
COLUMNS: Final = (
    "running",
    "waiting",
    "kv_cache_usage",
    *_RATES,
    *_COUNTS,
    *(f"{latency}_{quantile}" for latency in _LATENCIES for quantile in _QUANTILES),
)
"""The numbers of a row: gauges, tokens per second, counts, and seconds; None where there was nothing to measure."""


def quantile_of(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The value that a ``share`` of a histogram's observations do not exceed, if each bucket is evenly filled.

    Args:
        bounds: Upper bounds of the buckets, ascending; the last bucket has none, and counts as its lower bound.
        counts: Observations in each single bucket; one more than there are bounds.
        share: From 0 to 1.

    Returns:
        None if there are no observations.
    """
    wanted = share * sum(counts)
    if not any(counts):
        return None
    below = 0
    for index, count in enumerate(counts):
        if count and below + count >= wanted:
            if index == len(bounds):
                break
            start = bounds[index - 1] if index else 0.0
            return start + (bounds[index] - start) * max(wanted - below, 0) / count
        below += count
    return bounds[-1] if bounds else None


@dataclass(frozen=True, slots=True)
class _Reading:
    """The counters of one or several engines that a row needs."""

    running: int
    waiting: int
    usable_blocks: int
    free_blocks: int
    counters: Mapping[str, int]
    histograms: Mapping[str, tuple[Sequence[float], Sequence[int]]]

    @classmethod
    def of(cls, metrics: EngineMetrics) -> Self:
        """The part of an engine's counters that is kept."""
        names = [*_RATES.values(), *(name for group in _COUNTS.values() for name in group)]
        values = metrics.counters
        kept = {name: metrics.histograms[name] for name in _LATENCIES.values() if name in metrics.histograms}
        return cls(
            values["num_running"],
            metrics.num_waiting,
            values["num_usable_blocks"],
            values["num_free_blocks"],
            {name: values.get(name, 0) for name in names},
            {name: (histogram.bounds, histogram.counts) for name, histogram in kept.items()},
        )

    @classmethod
    def together(cls, readings: Sequence[Self]) -> Self:
        """Combine several engines."""
        first = readings[0]
        return cls(
            sum(each.running for each in readings),
            sum(each.waiting for each in readings),
            sum(each.usable_blocks for each in readings),
            sum(each.free_blocks for each in readings),
            {name: sum(each.counters[name] for each in readings) for name in first.counters},
            {
                name: (bounds, [sum(at) for at in zip(*(each.histograms[name][1] for each in readings), strict=True)])
                for name, (bounds, _) in first.histograms.items()
            },
        )

    def since(self, before: Self | None) -> Self:
        """The reading with only the counts since another; all counts if there is none, or if the engine restarted."""
        counts_again = before is None or self.histograms.keys() != before.histograms.keys()
        if before is None or counts_again or any(self.counters[name] < was for name, was in before.counters.items()):
            return self
        return type(self)(
            self.running,
            self.waiting,
            self.usable_blocks,
            self.free_blocks,
            {name: value - before.counters[name] for name, value in self.counters.items()},
            {
                name: (bounds, [now - then for now, then in zip(counts, before.histograms[name][1], strict=True)])
                for name, (bounds, counts) in self.histograms.items()
            },
        )

    def totals(self) -> dict[str, int]:
        """The sums of the counters, by column."""
        return {name: sum(self.counters[each] for each in group) for name, group in _COUNTS.items()}

    def row(self, seconds: float) -> list[float | None]:
        """The numbers of :data:`COLUMNS`, if the counts took ``seconds``."""
        used = self.usable_blocks - self.free_blocks
        row: list[float | None] = [self.running, self.waiting, round(used / max(self.usable_blocks, 1), 4)]
        row += [round(self.counters[name] / max(seconds, 1e-9), 2) for name in _RATES.values()]
        row += self.totals().values()
        for name in _LATENCIES.values():
            bounds, counts = self.histograms.get(name, ((), ()))
            for share in _QUANTILES.values():
                value = quantile_of(bounds, counts, share)
                row.append(None if value is None else round(value, 7))
        return row


class MetricsHistory:
    """Remembers readings of the engines' counters, which the caller makes about every :data:`INTERVAL_SECONDS`.

    Used by one thread. An hour takes about 100 KB per engine.
    """

    def __init__(self) -> None:
        self._readings: deque[tuple[float, dict[int, _Reading]]] = deque(maxlen=_NUM_READINGS)
        self._points: deque[tuple[int, str]] = deque(maxlen=MAX_POINTS)
        self._num_points = 0

    def add(self, monotonic: float, unix: float, engines: Sequence[EngineMetrics]) -> None:
        """Add a reading; each but the first makes a point.

        Args:
            monotonic: Seconds of a clock that does not jump.
            unix: Seconds of the wall clock.
            engines: The engines that answered.
        """
        now = {metrics.engine: _Reading.of(metrics) for metrics in engines}
        if self._readings:
            then, before = self._readings[-1]
            self._num_points += 1
            point = {"number": self._num_points, "time": round(unix, 1), **_rows(now, before, monotonic - then)}
            # Rendered only once, so that a viewer who wants the whole hour does not delay streams.
            self._points.append((self._num_points, json.dumps(point, separators=(",", ":"))))
        self._readings.append((monotonic, now))

    def recent(self, monotonic: float, engines: Sequence[EngineMetrics]) -> dict[str, Any]:
        """The last minute, or as much as is known, and the counts since the start; does not make a point."""
        now = {metrics.engine: _Reading.of(metrics) for metrics in engines}
        then, before = self._readings[0] if self._readings else (monotonic, {})
        seconds = monotonic - then
        totals = _Reading.together(list(now.values())).totals() if now else {}
        return {
            "seconds": round(seconds, 1),
            "columns": COLUMNS,
            "totals": {"all": totals, **{str(rank): reading.totals() for rank, reading in now.items()}},
            **_rows(now, before, seconds),
        }

    def as_json(self, since: int) -> str:
        """The points after number ``since``, oldest first, with the meaning of their numbers."""
        head = json.dumps({"seconds": INTERVAL_SECONDS, "columns": COLUMNS}, separators=(",", ":"))
        points = ",".join(point for number, point in self._points if number > since)
        return f'{head[:-1]},"points":[{points}]}}'


def _rows(now: Mapping[int, _Reading], before: Mapping[int, _Reading], seconds: float) -> dict[str, Any]:
    """A row for each engine, and one for all together."""
    changes = {rank: reading.since(before.get(rank)) for rank, reading in now.items()}
    return {
        "all": _Reading.together(list(changes.values())).row(seconds) if changes else None,
        "engines": {str(rank): change.row(seconds) for rank, change in changes.items()},
    }
