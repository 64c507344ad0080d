"""The metrics under vLLM's names: their kinds, and the sources of their numbers.

``docs/metrics.md`` explains what is counted, and when.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from rustvllm.config import METRICS_PREFIX, EngineConfig
from rustvllm.observe.metrics.counters import (
    FINISH_REASONS,
    Counter,
    EngineMetrics,
    Gauge,
    Histogram,
    HistogramValues,
    Metric,
)

STEP_PHASES = ("schedule", "prepare", "forward", "sample", "wait", "update", "output")
"""Parts of a step, in order."""

Kind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True, slots=True)
class Family:
    """All series of one name.

    Attributes:
        name: The name without prefix, and without the ``_total`` of counters.
        kind: The kind of metric.
        help: One line for people.
        label: The label that distinguishes its series, besides ``model_name`` and ``engine``; empty if there is one.
        series: Returns label value and number of each series, if they are not the same for every engine.
        sources: The source of each series's number, by the value of that label: the name of a counter or histogram of
            the core, or a function of all counts.
    """

    name: str
    kind: Kind
    help: str
    sources: dict[str, "str | Callable[[EngineMetrics], float]"]
    label: str = ""
    series: "Callable[[EngineMetrics], Iterator[tuple[str, float]]] | None" = None

    def values(self, metrics: EngineMetrics) -> "Iterator[tuple[str, float | HistogramValues]]":
        """Label value and number, or histogram, of each series."""
        if self.series is not None:
            yield from self.series(metrics)
        for value, source in self.sources.items():
            if not isinstance(source, str):
                yield value, source(metrics)
            elif self.kind != "histogram":
                yield value, metrics.counters[source]
            elif source in metrics.histograms:
                yield value, metrics.histograms[source]


def _one(name: str, kind: Kind, help_text: str, source: "str | Callable[[EngineMetrics], float]") -> Family:
    return Family(name, kind, help_text, {"": source})


def _accepted_by_position(metrics: EngineMetrics) -> Iterator[tuple[str, float]]:
    """How often the draft at each position was accepted, up to the farthest accepted one; at least the first."""
    if (accepted := metrics.histograms.get("accepted_drafts")) is not None:
        numbers = [sum(accepted.counts[position + 1 :]) for position in range(len(accepted.counts) - 1)]
        for position, number in enumerate(numbers):
            if number or not position:
                yield str(position), number


FAMILIES = (
    _one("num_requests_running", "gauge", "Requests that are in the running list.", "num_running"),
    _one(
        "num_requests_waiting", "gauge", "Requests that wait, preempted ones included.", lambda all_: all_.num_waiting
    ),
    Family(
        "num_requests_waiting_by_reason",
        "gauge",
        "Requests that wait: for room (capacity), or for their grammar to be compiled (deferred).",
        {
            "capacity": lambda all_: max(all_.num_waiting - all_.counters["num_waiting_for_grammar"], 0),
            "deferred": "num_waiting_for_grammar",
        },
        "reason",
    ),
    _one(
        "kv_cache_usage_perc",
        "gauge",
        "Share of the KV blocks that requests use, 0 to 1; cached blocks without a user count as free.",
        lambda all_: all_.kv_cache_usage,
    ),
    Family(
        "engine_sleep_state",
        "gauge",
        "Whether the engine is awake (1); this one never sleeps.",
        {"awake": lambda _: 1, "weights_offloaded": lambda _: 0, "discard_all": lambda _: 0},
        "sleep_state",
    ),
    _one(
        "prefix_cache_queries",
        "counter",
        "Prompt tokens that were looked up in the prefix cache.",
        "prefix_cache_queries",
    ),
    _one("prefix_cache_hits", "counter", "Prompt tokens that were found in the prefix cache.", "prefix_cache_hits"),
    _one("num_preemptions", "counter", "Times that a request lost its place.", "num_preemptions"),
    _one("prompt_tokens", "counter", "Tokens of prompts whose request got its first token.", "num_prompt_tokens"),
    _one(
        "prompt_tokens_cached",
        "counter",
        "Of prompt_tokens, those that were not computed: cached, or shared with another sample.",
        "num_prompt_tokens_cached",
    ),
    _one("generation_tokens", "counter", "Tokens of outputs.", "num_generation_tokens"),
    _one(
        "grammar_forced_tokens",
        "counter",
        "Tokens that a grammar left no choice about, and no step was spent on.",
        "num_forced_tokens",
    ),
    _one("spec_decode_num_drafts", "counter", "Requests that ran drafts in a step, once for each step.", "num_drafts"),
    _one("spec_decode_num_draft_tokens", "counter", "Drafts that were run.", "num_draft_tokens"),
    _one("spec_decode_num_accepted_tokens", "counter", "Of these, those that were kept.", "num_accepted_tokens"),
    Family(
        "spec_decode_num_accepted_tokens_per_pos",
        "counter",
        "Drafts that were kept, by their place behind the last known token.",
        {},
        "position",
        _accepted_by_position,
    ),
    _one(
        "spec_decode_num_withheld_draft_tokens",
        "counter",
        "Drafts that were found and not run, because they would not have paid.",
        "num_withheld_draft_tokens",
    ),
    _one("spec_decode_num_pauses", "counter", "Times that drafts were switched off for a while.", "num_draft_pauses"),
    _one("spec_decode_paused", "gauge", "Whether drafts are switched off now.", "is_drafting_paused"),
    Family(
        "request_success",
        "counter",
        "Requests that have ended, by the reason.",
        {reason: f"num_finished_{reason}" for reason in FINISH_REASONS},
        "finished_reason",
    ),
    Family(
        "admission_rejections",
        "counter",
        "Requests that the engine did not take, or not begin in time, by the limit that was met.",
        {
            "max_num_queued_reqs": "num_rejected_max_num_queued_reqs",
            "max_num_queued_tokens": "num_rejected_max_num_queued_tokens",
            "queue_timeout": "num_queue_timeouts",
        },
        "reason",
    ),
    _one("time_to_first_token_seconds", "histogram", "From arrival to the first token.", "time_to_first_token"),
    _one("inter_token_latency_seconds", "histogram", "From one token to the next.", "inter_token_latency"),
    _one(
        "request_time_per_output_token_seconds",
        "histogram",
        "Mean time from token to token of a request that gave two or more.",
        "request_time_per_output_token",
    ),
    _one("e2e_request_latency_seconds", "histogram", "From arrival to the end.", "e2e_request_latency"),
    _one("request_queue_time_seconds", "histogram", "From the engine's queue to the first step.", "request_queue_time"),
    _one(
        "request_inference_time_seconds",
        "histogram",
        "From the first step to the last token.",
        "request_inference_time",
    ),
    _one(
        "request_prefill_time_seconds", "histogram", "From the first step to the first token.", "request_prefill_time"
    ),
    _one("request_decode_time_seconds", "histogram", "From the first token to the last.", "request_decode_time"),
    _one("request_prompt_tokens", "histogram", "Tokens of the prompt.", "request_prompt_tokens"),
    _one("request_generation_tokens", "histogram", "Tokens that were sampled.", "request_generation_tokens"),
    _one(
        "request_max_num_generation_tokens",
        "histogram",
        "Tokens of a request's longest sample.",
        "request_max_num_generation_tokens",
    ),
    _one(
        "request_prefill_kv_computed_tokens",
        "histogram",
        "Tokens of the prompt that were computed, not cached or shared.",
        "request_prefill_kv_computed_tokens",
    ),
    _one("request_params_n", "histogram", "Samples of a request.", "request_params_n"),
    _one("request_params_max_tokens", "histogram", "max_tokens of a request.", "request_params_max_tokens"),
    _one("request_num_preemptions", "histogram", "How often a request was preempted.", "request_num_preemptions"),
    _one(
        "iteration_tokens_total",
        "histogram",
        "Tokens of a step: prompts that it completed, and tokens that it sampled.",
        "iteration_tokens",
    ),
    _one("step_time_seconds", "histogram", "A step, from its planning until its tokens were handed over.", "step_time"),
    Family(
        "step_phase_time_seconds",
        "histogram",
        "A part of a step; with async scheduling parts of two steps overlap.",
        {phase: f"step_{phase}_time" for phase in STEP_PHASES},
        "phase",
    ),
)
"""All metrics except ``cache_config_info``, whose only value is 1."""


def cache_config_labels(config: EngineConfig, metrics: EngineMetrics) -> dict[str, str]:
    """Labels of ``cache_config_info``: the size of the KV cache, and its configuration."""
    cache, usable = config.cache, metrics.counters["num_usable_blocks"]
    num_tokens = usable * cache.block_size
    values = {
        "block_size": cache.block_size,
        "cache_dtype": cache.kv_cache_dtype,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "gpu_memory_utilization": cache.gpu_memory_utilization,
        "num_gpu_blocks": usable + 1,
        "num_gpu_blocks_override": cache.num_gpu_blocks_override,
        "prefix_caching_hash_algo": cache.prefix_caching_hash_algo,
        "swap_space": cache.swap_space,
        "kv_cache_size_tokens": num_tokens,
        "kv_cache_max_concurrency": round(num_tokens / config.model.max_model_len, 2),
    }
    return {name: str(value) for name, value in values.items()}


def shown_bound(bound: float) -> str:
    """The label of a bucket's bound."""
    return repr(float(bound))


def as_metrics(
    engines: list[EngineMetrics], config: EngineConfig, model_name: str, prefix: str = METRICS_PREFIX
) -> list[Metric]:
    """All series with their names, for programs."""
    series: list[Metric] = []
    for family in FAMILIES:
        for engine in engines:
            for value, number in family.values(engine):
                labels = {"model_name": model_name, "engine": str(engine.engine)}
                if family.label:
                    labels[family.label] = value
                series.append(_as_metric(family, prefix + family.name, labels, number))
    for engine in engines:
        labels = {**cache_config_labels(config, engine), "engine": str(engine.engine)}
        series.append(Gauge(f"{prefix}cache_config_info", labels, 1))
    return series


def _as_metric(family: Family, name: str, labels: dict[str, str], number: "float | HistogramValues") -> Metric:
    if isinstance(number, HistogramValues):
        bounds = [*map(shown_bound, number.bounds), "+Inf"]
        return Histogram(name, labels, number.count, number.sum, dict(zip(bounds, number.cumulative(), strict=True)))
    if family.kind == "counter":
        return Counter(name, labels, int(number))
    return Gauge(name, labels, number)
