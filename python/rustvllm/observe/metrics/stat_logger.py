""":class:`StatLogger`: receives engine statistics periodically; the line in the log is one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from rustvllm.config import EngineConfig
from rustvllm.logger import init_logger
from rustvllm.observe.metrics.counters import EngineMetrics

logger = init_logger(__name__)


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """An engine's scheduler as it is now.

    Attributes:
        num_running_reqs: Requests that run.
        num_waiting_reqs: Requests that wait.
        kv_cache_usage: Share of the KV blocks in use, 0 to 1.
        prefix_cache_queries: Prompt tokens looked up since the last record.
        prefix_cache_hits: Of these, found.
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
        seconds: How long that was.
        num_steps: Steps.
        num_prompt_tokens: Tokens of prompts that were completed.
        num_prompt_tokens_cached: Of these, not computed.
        num_generation_tokens: Tokens that were sampled.
        num_preempted_reqs: Preemptions.
        num_finished_reqs: Requests that ended, by reason.
        metrics: All that was counted since the engine was started.
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
    """Hears of one engine. Subclass it, and give the class, or a function that makes one, as ``stat_loggers``.

    It is called in a thread of its own, every ``RUSTVLLM_LOG_STATS_INTERVAL`` seconds, and once more at the end; what
    it raises is logged and changes nothing.
    """

    def __init__(self, config: EngineConfig, engine_index: int = 0) -> None:
        """Make one for an engine.

        Args:
            config: What the engine was built from.
            engine_index: Its rank.
        """
        self.config = config
        self.engine_index = engine_index

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None, engine_idx: int = 0
    ) -> None:
        """Take the news of an interval; both are there, always."""

    def log(self) -> None:
        """Say what there is to say, after :meth:`record`."""

    def log_engine_initialized(self) -> None:
        """The engine serves from now on."""


StatLoggerFactory: TypeAlias = Callable[[EngineConfig, int], StatLogger]
"""Makes a logger for the engine of a rank: a subclass of :class:`StatLogger`, or a function."""


class LoggingStatLogger(StatLogger):
    """One line per interval in which there was something to do."""

    def __init__(self, config: EngineConfig, engine_index: int = 0) -> None:
        super().__init__(config, engine_index)
        self._line = ""
        self._num_queries = self._num_hits = 0

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None, engine_idx: int = 0
    ) -> None:
        """Make the line, if there was traffic."""
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
