"""An engine's counts at one moment: :class:`EngineMetrics`, and the classes of series that ``LLM.get_metrics`` returns.

The thread that schedules counts in Rust (``crates/scheduler/src/metrics.rs``); this module reads the counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Self

from rustvllm import _core

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
"""Why requests end, in the names of ``request_success``."""


@dataclass(frozen=True, slots=True)
class HistogramValues:
    """A histogram; times in seconds.

    Attributes:
        bounds: Upper bounds of the buckets, ascending; the last bucket has none.
        counts: Values in each single bucket; one more than there are bounds.
        sum: The sum of all values.
    """

    bounds: Sequence[float]
    counts: Sequence[int]
    sum: float

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)

    def cumulative(self) -> list[int]:
        """The number of values up to each bound, and at the end the number of all."""
        return list(accumulate(self.counts))


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """All counts of one engine since its start.

    Attributes:
        engine: Its rank.
        counters: The scheduler's counters by name (``crates/scheduler/src/metrics/stats.rs``).
        histograms: Times and sizes by name; empty with ``disable_log_stats``.
    """

    engine: int
    counters: Mapping[str, int]
    histograms: Mapping[str, HistogramValues] = field(default_factory=dict)

    @classmethod
    def from_core(cls, engine: int, counted: "_core.CountedMetrics") -> Self:
        """Convert what the core returns for one engine."""
        histograms = {name: HistogramValues(*values) for name, values in counted["histograms"].items()}
        return cls(engine, counted["counters"], histograms)

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV blocks that are in use, 0 to 1; cached blocks without a user count as free."""
        usable = self.counters["num_usable_blocks"]
        return (usable - self.counters["num_free_blocks"]) / max(usable, 1)

    @property
    def num_waiting(self) -> int:
        """Waiting requests, including those that the scheduler has not looked at yet."""
        # The scheduler's own count is as of its last step; a request that was never admitted is queued from the start.
        return max(self.counters["num_waiting"], self.counters["num_queued"])

    @property
    def finished(self) -> dict[str, int]:
        """Requests that have ended, by reason."""
        return {reason: self.counters[f"num_finished_{reason}"] for reason in FINISH_REASONS}


def read_metrics(handle: _core.EngineHandle | _core.EngineClient, timeout: float) -> list[EngineMetrics]:
    """Read the counters of a handle's engines, without their schedulers or interpreters.

    Args:
        handle: The handle of an engine in this process, or a client of other processes.
        timeout: Seconds to wait for engines in other processes.

    Returns:
        One entry for each engine that is alive and answers in time.
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
        name: The name with its prefix, such as ``vllm:num_requests_running``; a counter's without ``_total``.
        labels: The labels, including ``model_name`` and ``engine``.
    """

    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A number that may go up and down."""

    value: float


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """The distribution of values.

    Attributes:
        count: The number of values.
        sum: Their sum.
        buckets: The number of values up to each bound, by the bound as text; the last is ``+Inf``.
    """

    count: int
    sum: float
    buckets: dict[str, int]
