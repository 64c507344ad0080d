"""The report of ``rustvllm bench serve``: JSON with vLLM's key names and what theirs lacks, and a table of it."""

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rustvllm import _core
from rustvllm.cli.bench.report.machine import machine, versions

METRICS: Final = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
WIDTH: Final = 56
KEYS: Final = {
    "date", "backend", "endpoint_type", "label", "base_url", "endpoint", "model_id", "tokenizer_id", "dataset_name",
    "num_prompts", "request_rate", "burstiness", "max_concurrency", "seed", "duration", "completed", "failed",
    "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput", "goodput",
    "output_throughput", "total_token_throughput", "max_concurrent_requests", "content_events", "events_per_stream",
    "tokens_per_event", "event_throughput", "output_tokens_from", "requests_without_usage",
    "requests_of_unknown_input", "errors_by_kind", "error_examples", "bytes_received", "client_cpu_s", "client_load",
    "machine", "versions", "build_profile", "input_lens", "output_lens", "ttfts", "itls", "start_times",
    "errors", "generated_texts",
}  # fmt: skip
"""Names in a report but those of :data:`METRICS`, so that ``--metadata`` cannot hide one."""


def is_own_key(key: str) -> bool:
    """Whether a report has a value of its own under this name, or could with other flags."""
    return key in KEYS or key.endswith(tuple(f"_{name}_ms" for name in METRICS))


def build_report(
    args: argparse.Namespace,
    base_url: str,
    model: str,
    date: str,
    goodput: Mapping[str, float],
    measured: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything there is to say of a run.

    Args:
        args: Parsed flags.
        base_url: Of the server.
        model: Asked for.
        date: When it began.
        goodput: Limits in milliseconds, by metric.
        measured: What ``_core.bench_serve`` returned.
    """
    duration = measured["duration"] or math.inf
    input_tokens, output_tokens = measured["total_input_tokens"], measured["total_output_tokens"]
    events, without_usage = measured["content_events"], measured["requests_without_usage"]
    report: dict[str, Any] = {
        "date": date,
        "backend": args.backend,
        "endpoint_type": args.backend,
        "label": args.label,
        "base_url": base_url,
        "endpoint": args.endpoint,
        "model_id": model,
        "tokenizer_id": args.tokenizer,
        **dict(args.metadata),
        "dataset_name": args.dataset_name,
        "num_prompts": args.num_prompts,
        "request_rate": args.request_rate if math.isfinite(args.request_rate) else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "seed": args.seed,
        "duration": measured["duration"],
        "completed": measured["completed"],
        "failed": measured["failed"],
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": measured["completed"] / duration,
        "request_goodput": None if measured["good"] is None else measured["good"] / duration,
        "goodput": dict(goodput),
        "output_throughput": output_tokens / duration,
        "total_token_throughput": (input_tokens + output_tokens) / duration,
        "max_concurrent_requests": measured["max_concurrent_requests"],
    }
    for name in METRICS:
        report |= _metric(f"{name}_ms", measured[name], args.metric_percentiles)
    per_stream = measured["events_per_stream"]
    report |= {
        "content_events": events,
        "events_per_stream": {key: per_stream[key] for key in ("mean", "median", "min", "max")},
        "tokens_per_event": output_tokens / events if events else None,
        "event_throughput": events / duration,
        "output_tokens_from": "usage" if not without_usage else "events" if without_usage == measured["completed"] else
        "usage and events",
        "requests_without_usage": without_usage,
        "requests_of_unknown_input": measured["requests_of_unknown_input"],
        "errors_by_kind": {kind: count for kind, count, _ in measured["failures"]},
        "error_examples": {kind: example for kind, _, example in measured["failures"]},
        "bytes_received": measured["bytes_received"],
        "client_cpu_s": measured["client_cpu_s"],
        "client_load": measured["client_cpu_s"] / duration,
        "machine": machine(),
        "versions": versions(),
        "build_profile": _core.build_profile,
    }  # fmt: skip
    if "requests" in measured:
        report |= _of_each(measured["requests"])
    return report


def _of_each(requests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Lists with a value per request, in the order in which they were sent; times in seconds."""
    names = {
        "input_lens": "input_tokens",
        "output_lens": "output_tokens",
        "ttfts": "ttft",
        "itls": "itl",
        "start_times": "sent",
        "errors": "error",
    }
    return {theirs: [request[ours] for request in requests] for theirs, ours in names.items()}


def _metric(name: str, values: Mapping[str, Any], percentiles: Sequence[float]) -> dict[str, float | None]:
    """Of no number at all, nothing is known: no time is 0 because no request has it."""
    metric = {f"{kind}_{name}": values[kind] for kind in ("mean", "median", "std")}
    numbers = zip(percentiles, values["percentiles"], strict=True)
    metric |= {f"p{_plain(at)}_{name}": value for at, value in numbers}
    return metric if values["count"] else dict.fromkeys(metric)


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)


def summary(report: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """The report for people, in the form that vLLM's users know."""
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]

    def add(label: str, value: object) -> None:
        text = f"{value:.2f}" if isinstance(value, float) else "-" if value is None else str(value)
        lines.append(f"{label:<40} {text:>{WIDTH - 41}}")

    add("Successful requests:", report["completed"])
    add("Failed requests:", report["failed"])
    for kind, count in report["errors_by_kind"].items():
        add(f"  {kind}:", count)
    if report["max_concurrency"] is not None:
        add("Maximum request concurrency:", report["max_concurrency"])
    if report["request_rate"] != "inf":
        add("Request rate configured (RPS):", report["request_rate"])
    add("Benchmark duration (s):", report["duration"])
    if not report["completed"]:
        return "\n".join([*lines, "=" * WIDTH])  # nothing else is known
    add("Total input tokens:", report["total_input_tokens"])
    add("Total generated tokens:", report["total_output_tokens"])
    add("Request throughput (req/s):", report["request_throughput"])
    if report["request_goodput"] is not None:
        add("Request goodput (req/s):", report["request_goodput"])
    add("Output token throughput (tok/s):", report["output_throughput"])
    add("Total token throughput (tok/s):", report["total_token_throughput"])
    add("Tokens per event:", report["tokens_per_event"] or 0.0)
    add("Load of the client (1.00: its limit):", report["client_load"])
    for name in metrics:
        lines.append(f"{METRICS[name]:-^{WIDTH}}")
        add(f"Mean {name.upper()} (ms):", report[f"mean_{name}_ms"])
        add(f"Median {name.upper()} (ms):", report[f"median_{name}_ms"])
        for at in percentiles:
            add(f"P{_plain(at)} {name.upper()} (ms):", report[f"p{_plain(at)}_{name}_ms"])
    lines.append("=" * WIDTH)
    notes = []
    if report["requests_without_usage"]:
        notes.append(
            f"{report['requests_without_usage']} answers came without usage: each of their events counts as one token."
        )
    if report["requests_of_unknown_input"]:
        notes.append(f"The number of tokens is unknown of {report['requests_of_unknown_input']} prompts.")
    notes += [f"First {kind}: {example}" for kind, example in report["error_examples"].items()]
    return "\n".join(lines + notes)
