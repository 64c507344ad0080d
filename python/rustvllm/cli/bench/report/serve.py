"""The report of ``rustvllm bench serve``: JSON with vLLM's key names and what theirs lacks, and a table of it."""

import argparse
import math
import time
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


def build_report(
    args: argparse.Namespace, base_url: str, model: str, goodput: Mapping[str, float], measured: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything there is to say of a run.

    Args:
        args: Parsed flags.
        base_url: Of the server.
        model: Asked for.
        goodput: Limits in milliseconds, by metric.
        measured: What ``_core.bench_serve`` returned.
    """
    duration = measured["duration"] or math.inf
    input_tokens, output_tokens = measured["total_input_tokens"], measured["total_output_tokens"]
    events, without_usage = measured["content_events"], measured["requests_without_usage"]
    report: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": "openai",
        "base_url": base_url,
        "endpoint": args.endpoint,
        "model_id": model,
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
    return report


def _metric(name: str, values: Mapping[str, Any], percentiles: Sequence[float]) -> dict[str, float]:
    metric = {f"{kind}_{name}": values[kind] for kind in ("mean", "median", "std")}
    numbers = zip(percentiles, values["percentiles"], strict=True)
    return metric | {f"p{at:g}_{name}": value for at, value in numbers}


def summary(report: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """The report for people, in the form that vLLM's users know."""
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]

    def add(label: str, value: object) -> None:
        text = f"{value:.2f}" if isinstance(value, float) else str(value)
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
            add(f"P{at:g} {name.upper()} (ms):", report[f"p{at:g}_{name}_ms"])
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
