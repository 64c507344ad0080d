"""What an engine has counted, at one moment: :class:`EngineMetrics`; the same by name, as ``LLM.get_metrics`` gives it.

The numbers are counted in Rust by the thread that schedules (``crates/scheduler/src/metrics.rs``). Here they are read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Self

from rustvllm import _core

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
"""Why requests end, as ``request_success`` names it."""


@dataclass(frozen=True, slots=True)
class HistogramValues:
    """A histogram; times in seconds.

    Attributes:
        bounds: Upper bounds of the buckets, ascending; the last bucket has none.
        counts: Values in each bucket alone, one more than there are bounds.
        sum: Of all values.
    """

    bounds: Sequence[float]
    counts: Sequence[int]
    sum: float

    @property
    def count(self) -> int:
        """How many values there are."""
        return sum(self.counts)

    def cumulative(self) -> list[int]:
        """Values up to each bound, and at the end all of them."""
        return list(accumulate(self.counts))


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """All that one engine has counted since it was started.

    Attributes:
        engine: Its rank.
        counters: The scheduler's numbers by name (``crates/scheduler/src/stats.rs``).
        histograms: Times and sizes by name; none with ``disable_log_stats``.
    """

    engine: int
    counters: Mapping[str, int]
    histograms: Mapping[str, HistogramValues] = field(default_factory=dict)

    @classmethod
    def from_core(cls, engine: int, counted: "_core.CountedMetrics") -> Self:
        """What the core gives for one engine."""
        histograms = {name: HistogramValues(*values) for name, values in counted["histograms"].items()}
        return cls(engine, counted["counters"], histograms)

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV blocks that are in use, 0 to 1; cached blocks without a user count as free."""
        usable = self.counters["num_usable_blocks"]
        return (usable - self.counters["num_free_blocks"]) / max(usable, 1)

    @property
    def num_waiting(self) -> int:
        """Waiting requests, including those that the scheduler has yet to look at."""
        # What the scheduler counts is as of its last step; a request that was never admitted is queued from the start.
        return max(self.counters["num_waiting"], self.counters["num_queued"])

    @property
    def finished(self) -> dict[str, int]:
        """Requests that have ended, by reason."""
        return {reason: self.counters[f"num_finished_{reason}"] for reason in FINISH_REASONS}


def read_metrics(handle: _core.EngineHandle | _core.EngineClient, timeout: float) -> list[EngineMetrics]:
    """Read the counters of a handle's engines, without their schedulers or interpreters.

    Args:
        handle: Of an engine in this process, or a client of others.
        timeout: Seconds to wait for engines in other processes.

    Returns:
        One entry per engine that lives and answers in time.
    """
    if isinstance(handle, _core.EngineHandle):
        return [EngineMetrics.from_core(0, handle.metrics())]
    return [
        EngineMetrics.from_core(rank, counted)
        for rank, counted in enumerate(handle.metrics(timeout))
        if counted is not None
    ]


@dataclass(frozen=True, slots=True)
class Metric:
    """One series.

    Attributes:
        name: With its prefix, for example ``vllm:num_requests_running``; a counter's without ``_total``.
        labels: Among them ``model_name`` and ``engine``.
    """

    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A number as it is now."""

    value: float


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """How values are spread.

    Attributes:
        count: Values.
        sum: Their sum.
        buckets: Values up to each bound, by the bound as text; ``+Inf`` is the last.
    """

    count: int
    sum: float
    buckets: dict[str, int]
