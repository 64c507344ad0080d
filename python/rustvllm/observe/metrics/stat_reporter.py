""":class:`StatReporter`: reads engines' counts every few seconds and passes them to their :class:`StatLogger`."""

import atexit
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rustvllm import envs
from rustvllm.config import EngineConfig
from rustvllm.exceptions import ConfigError
from rustvllm.logger import init_logger
from rustvllm.observe.metrics.counters import EngineMetrics
from rustvllm.observe.metrics.stat_logger import IterationStats, SchedulerStats, StatLogger, StatLoggerFactory
from rustvllm.process.patient_join import patient_join

logger = init_logger(__name__)

_END_TIMEOUT = 1.0
"""Seconds to wait at the end for loggers that are still running."""


def checked_factories(stat_loggers: Sequence[StatLoggerFactory] | None) -> tuple[StatLoggerFactory, ...]:
    """What makes the stat loggers of an engine; None: there are none of the caller's.

    Raises:
        ConfigError: It is not a list of classes or functions.
    """
    given: Any = stat_loggers
    factories = tuple(given or ()) if isinstance(given, Iterable | None) and not isinstance(given, str) else (None,)
    if not all(map(callable, factories)):
        raise ConfigError(
            "stat_loggers must be a list of classes, or of functions, that make stat loggers, got "
            f"{stat_loggers!r:.200}"
        )
    return factories


class StatReporter:
    """A thread that periodically reads the counts and calls the loggers.

    Args:
        source: Returns the counts of each engine; must not keep an object alive that ends the reporter when dropped.
        loggers: Functions that make the loggers; called once for each engine.
        config: The configuration of the engines.

    Raises:
        ConfigError: ``RUSTVLLM_LOG_STATS_INTERVAL`` is not a number of seconds.
    """

    def __init__(
        self,
        source: Callable[[], Sequence[EngineMetrics]],
        loggers: Sequence[StatLoggerFactory],
        config: EngineConfig,
    ) -> None:
        self._source = source
        self._factories = tuple(loggers)
        self._config = config
        self._interval = envs.log_stats_interval()
        self._loggers: dict[int, list[StatLogger]] = {}
        self._last: dict[int, tuple[float, Mapping[str, int]]] = {}
        self._lock = threading.Lock()  # for the loggers, which a caller may call between two turns of the thread
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rustvllm-stats", daemon=True)

    def start(self) -> None:
        """Make the first reading, and start the thread."""
        self.look()
        self._thread.start()
        # A thread that returns from native code while the interpreter shuts down would crash the process.
        atexit.register(self.stop)

    def look(self) -> None:
        """Read the counts, at which the next interval begins."""
        self._look(tell=False)

    def tell(self) -> None:
        """Read the counts, and call the loggers now."""
        self._look(tell=True)

    def stop(self) -> None:
        """Report the rest, as far as engines still answer, and end. Idempotent."""
        self._stopping.set()
        atexit.unregister(self.stop)
        patient_join(self._thread, _END_TIMEOUT)

    def _run(self) -> None:
        while not self._stopping.wait(self._interval):
            self._look(tell=True)
        self._look(tell=True)

    def _look(self, *, tell: bool) -> None:
        try:
            engines = self._source()
        except Exception as error:  # noqa: BLE001 -- the engine is ending
            logger.debug("no statistics: %s", error)
            return
        with self._lock:
            for metrics in engines:
                self._note(metrics, tell=tell)

    def _note(self, metrics: EngineMetrics, *, tell: bool) -> None:
        rank, now, counters = metrics.engine, time.monotonic(), metrics.counters
        if rank not in self._loggers:
            self._loggers[rank] = []
            for make in self._factories:
                with _logged(rank):
                    made = make(self._config, rank)
                    made.log_engine_initialized()
                    self._loggers[rank].append(made)
        then, before = self._last.get(rank, (now, counters))
        self._last[rank] = (now, counters)
        if not tell:
            return
        if counters["num_requests"] < before["num_requests"]:
            before = dict.fromkeys(counters, 0)  # a new engine has replaced this one
        scheduler_stats, iteration_stats = _interval_stats(metrics, before, now - then)
        for each in self._loggers[rank]:
            with _logged(rank):
                each.record(scheduler_stats, iteration_stats, rank)
                each.log()


@contextmanager
def _logged(rank: int) -> Iterator[None]:
    """Log an error that a logger raises, so that it affects neither other loggers nor the engine."""
    try:
        yield
    except Exception as error:
        logger.warning("a stat logger of engine %d failed", rank, exc_info=error)


def _interval_stats(
    metrics: EngineMetrics, before: Mapping[str, int], seconds: float
) -> tuple[SchedulerStats, IterationStats]:
    counters = metrics.counters

    def since(name: str) -> int:
        return counters[name] - before[name]

    return (
        SchedulerStats(
            num_running_reqs=counters["num_running"],
            num_waiting_reqs=metrics.num_waiting,
            kv_cache_usage=metrics.kv_cache_usage,
            prefix_cache_queries=since("prefix_cache_queries"),
            prefix_cache_hits=since("prefix_cache_hits"),
        ),
        IterationStats(
            seconds=seconds,
            num_steps=since("num_steps"),
            num_prompt_tokens=since("num_prompt_tokens"),
            num_prompt_tokens_cached=since("num_prompt_tokens_cached"),
            num_generation_tokens=since("num_generation_tokens"),
            num_preempted_reqs=since("num_preemptions"),
            num_finished_reqs={reason: since(f"num_finished_{reason}") for reason in metrics.finished},
            metrics=metrics,
        ),
    )
