"""Renders metrics for Prometheus: text format 0.0.4, or OpenMetrics 1.0.

A scrape has about 1,100 lines per engine, and the process that answers it also serves streams. The constant part of
each line is made only once, so that a scrape is a single pass over the numbers.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

from rustvllm.config import METRICS_PREFIX, EngineConfig
from rustvllm.observe.metrics.counters import EngineMetrics, HistogramValues
from rustvllm.observe.metrics.families import (
    FAMILIES,
    Family,
    cache_config_labels,
    shown_bound,
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class PrometheusText:
    """Renders the metrics of one server's engines. One thread uses it at a time."""

    def __init__(self, config: EngineConfig, model_name: str, prefix: str = METRICS_PREFIX) -> None:
        """Begin without rendered lines.

        Args:
            config: The configuration of the engines.
            model_name: The model label of every series.
            prefix: The prefix of every name.
        """
        self._config = config
        self._model_name = model_name
        self._prefix = prefix
        self._lines: dict[tuple[str, str, int], list[str]] = {}
        """By family, label and engine: lines up to their numbers."""

    def render(
        self,
        engines: Sequence[EngineMetrics],
        adapters: Mapping[int, tuple[Sequence[str], Sequence[str]]] | None = None,
        ranks: Mapping[int, Sequence[Mapping[str, Any]]] | None = None,
        *,
        openmetrics: bool = False,
    ) -> str:
        """Render all series of all engines.

        Args:
            engines: The counts of each engine.
            adapters: By engine, the names of the adapters of its running and of its waiting requests.
            ranks: By engine, the state of each of its ranks, from ``Executor.rank_states``.
            openmetrics: Whether to render OpenMetrics 1.0, which has other heads of counters and an end line.
        """
        out: list[str] = []
        for family in FAMILIES:
            lines: list[str] = []
            for engine in engines:
                for value, number in family.values(engine):
                    starts = self._lines.get((family.name, value, engine.engine))
                    if starts is None:
                        starts = self._start_lines(family, value, engine.engine, number)
                    lines += _lines(starts, number)
            if lines:
                out += self._head(family.name, family.kind, family.help, openmetrics=openmetrics)
                out += lines
        out += self._cache_config(engines, openmetrics=openmetrics)
        out += self._adapters(adapters or {}, openmetrics=openmetrics)
        out += self._ranks(ranks or {}, openmetrics=openmetrics)
        if openmetrics:
            out.append("# EOF\n")
        return "".join(out)

    def _head(self, name: str, kind: str, help_text: str, *, openmetrics: bool) -> list[str]:
        shown = self._prefix + name + ("_total" if kind == "counter" and not openmetrics else "")
        return [f"# HELP {shown} {help_text}\n", f"# TYPE {shown} {kind}\n"]

    def _start_lines(self, family: Family, value: str, engine: int, number: float | HistogramValues) -> list[str]:
        name = self._prefix + family.name
        own = {family.label: value} if family.label else {}
        labels = _labels({"model_name": self._model_name, "engine": str(engine), **own})
        if isinstance(number, HistogramValues):
            bounds = [*map(shown_bound, number.bounds), "+Inf"]
            starts = [f'{name}_bucket{{{labels},le="{bound}"}} ' for bound in bounds]
            starts += [f"{name}_count{{{labels}}} ", f"{name}_sum{{{labels}}} "]
        else:
            starts = [f"{name}{'_total' if family.kind == 'counter' else ''}{{{labels}}} "]
        self._lines[family.name, value, engine] = starts
        return starts

    def _cache_config(self, engines: Sequence[EngineMetrics], *, openmetrics: bool) -> list[str]:
        if not engines:
            return []
        out = self._head("cache_config_info", "gauge", "How the KV cache is made.", openmetrics=openmetrics)
        for engine in engines:
            labels = {**cache_config_labels(self._config, engine), "engine": str(engine.engine)}
            out.append(f"{self._prefix}cache_config_info{{{_labels(labels)}}} 1\n")
        return out

    def _adapters(self, adapters: Mapping[int, tuple[Sequence[str], Sequence[str]]], *, openmetrics: bool) -> list[str]:
        if not adapters or self._config.lora is None:
            return []
        about = "When it was asked which adapters requests have; labels name these."
        out = self._head("lora_requests_info", "gauge", about, openmetrics=openmetrics)
        for engine, (running, waiting) in adapters.items():
            labels = {
                "model_name": self._model_name,
                "engine": str(engine),
                "max_lora": str(self._config.lora.max_loras),
                "running_lora_adapters": ",".join(running),
                "waiting_lora_adapters": ",".join(waiting),
            }
            out.append(f"{self._prefix}lora_requests_info{{{_labels(labels)}}} {time.time()}\n")
        return out

    def _ranks(self, ranks: Mapping[int, Sequence[Mapping[str, Any]]], *, openmetrics: bool) -> list[str]:
        out: list[str] = []
        for name, kind, about, number in _OF_RANKS if ranks else ():
            out += self._head(name, kind, about, openmetrics=openmetrics)
            end = "_total" if kind == "counter" else ""
            for engine, states in ranks.items():
                for state in states:
                    labels = {"model_name": self._model_name, "engine": str(engine), "rank": str(state["rank"])}
                    labels |= {"node": str(state["node_rank"]), "stage": str(state["stage"])}
                    out.append(f"{self._prefix}{name}{end}{{{_labels(labels)}}} {number(state)}\n")
        return out


_OF_RANKS: Final[Sequence[tuple[str, str, str, Callable[[Mapping[str, Any]], float]]]] = (
    (
        "rank_running",
        "gauge",
        "1 while the process of a rank of the model lives and is not stopped.",
        lambda state: float(state["state"] in ("running", "sleeping", "waiting for a disk")),
    ),
    (
        "rank_step_age_seconds",
        "gauge",
        "Seconds since the last progress of a rank that has something to do; 0 without.",
        lambda state: float(state["step_age"]),
    ),
    (
        "rank_collective_seconds",
        "counter",
        "Seconds of a rank in collectives: what it waits for others, and what tensors take on their way.",
        lambda state: float(state["collective_seconds"]),
    ),
    (
        "rank_collectives",
        "counter",
        "Collectives of a rank that have ended.",
        lambda state: float(state["collectives"]),
    ),
)
"""Series of ranks: name, kind, help, number."""


def _lines(starts: Sequence[str], number: float | HistogramValues) -> list[str]:
    if not isinstance(number, HistogramValues):
        return [f"{starts[0]}{number}\n"]
    counts = list(accumulate(number.counts))
    numbers = [*counts, counts[-1], number.sum]
    return [f"{start}{value}\n" for start, value in zip(starts, numbers, strict=True)]


def _labels(labels: dict[str, str]) -> str:
    return ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
