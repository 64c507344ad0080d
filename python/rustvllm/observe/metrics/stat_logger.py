""":class:`StatLogger`: receives engine statistics periodically; one implementation writes a line to the log."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from rustvllm.config import EngineConfig
from rustvllm.logger import init_logger
from rustvllm.observe.metrics.counters import EngineMetrics

logger = init_logger(__name__)


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """The current state of an engine's scheduler.

    Attributes:
        num_running_reqs: Running requests.
        num_waiting_reqs: Waiting requests.
        kv_cache_usage: Share of the KV blocks in use, 0 to 1.
        prefix_cache_queries: Prompt tokens looked up since the last record.
        prefix_cache_hits: How many of these were found.
    """

    num_running_reqs: int
    num_waiting_reqs: int
    kv_cache_usage: float
    prefix_cache_queries: int
    prefix_cache_hits: int


@dataclass(frozen=True, slots=True)
class IterationStats:
    """What an engine's steps did since the last record.

    Attributes:
        seconds: The time since the last record.
        num_steps: Steps.
        num_prompt_tokens: Tokens of completed prompts.
        num_prompt_tokens_cached: How many of these were not computed.
        num_generation_tokens: Sampled tokens.
        num_preempted_reqs: Preemptions.
        num_finished_reqs: Requests that ended, by reason.
        metrics: All counts since the engine's start.
    """

    seconds: float
    num_steps: int
    num_prompt_tokens: int
    num_prompt_tokens_cached: int
    num_generation_tokens: int
    num_preempted_reqs: int
    num_finished_reqs: Mapping[str, int]
    metrics: EngineMetrics


class StatLogger:
    """Receives the statistics of one engine. Pass a subclass, or a function that makes one, as ``stat_loggers``.

    It is called in its own thread, every ``RUSTVLLM_LOG_STATS_INTERVAL`` seconds, and once more at the end; an error
    that it raises is logged and has no other effect.
    """

    def __init__(self, config: EngineConfig, engine_index: int = 0) -> None:
        """Make a logger for an engine.

        Args:
            config: The engine's configuration.
            engine_index: The engine's rank.
        """
        self.config = config
        self.engine_index = engine_index

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None, engine_idx: int = 0
    ) -> None:
        """Receive the statistics of an interval; neither of the first two is ever None."""

    def log(self) -> None:
        """Report; called after :meth:`record`."""

    def log_engine_initialized(self) -> None:
        """Called when the engine begins to serve."""


StatLoggerFactory: TypeAlias = Callable[[EngineConfig, int], StatLogger]
"""Makes a logger for the engine of a given rank: a subclass of :class:`StatLogger`, or a function."""


class LoggingStatLogger(StatLogger):
    """Logs one line per interval with activity."""

    def __init__(self, config: EngineConfig, engine_index: int = 0) -> None:
        super().__init__(config, engine_index)
        self._line = ""
        self._num_queries = self._num_hits = 0

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None, engine_idx: int = 0
    ) -> None:
        """Make the line, if there was activity."""
        self._line = ""
        if scheduler_stats is None or iteration_stats is None:
            return
        now, steps = scheduler_stats, iteration_stats
        self._num_queries += now.prefix_cache_queries
        self._num_hits += now.prefix_cache_hits
        if not (
            now.num_running_reqs or now.num_waiting_reqs or steps.num_steps or any(steps.num_finished_reqs.values())
        ):
            return
        seconds = max(steps.seconds, 1e-9)
        self._line = (
            f"Engine {engine_idx:03}: "
            f"Avg prompt throughput: {steps.num_prompt_tokens / seconds:.1f} tokens/s, "
            f"Avg generation throughput: {steps.num_generation_tokens / seconds:.1f} tokens/s, "
            f"Running: {now.num_running_reqs} reqs, Waiting: {now.num_waiting_reqs} reqs, "
            f"KV cache usage: {100 * now.kv_cache_usage:.1f}%, "
            f"Prefix cache hit rate: {100 * self._num_hits / max(self._num_queries, 1):.1f}%"
        )
        if steps.num_preempted_reqs:
            self._line += f", Preemptions: {steps.num_preempted_reqs}"

    def log(self) -> None:
        """Log the line."""
        if self._line:
            logger.info("%s", self._line)
