"""``rustvllm bench trace FILE``: replays a request trace through the scheduler, without a model."""

import json
from collections.abc import Sequence
from typing import Any

from rustvllm import _core
from rustvllm.cli.bench.arguments import microseconds, whole_number
from rustvllm.cli.bench.report.machine import machine, require_release_build, versions
from rustvllm.cli.parser import FlexibleArgumentParser


def make_parser() -> FlexibleArgumentParser:
    """The parser of ``rustvllm bench trace``."""
    parser = FlexibleArgumentParser(
        prog="rustvllm bench trace",
        usage="rustvllm bench trace FILE [flags]",
        description="Replay a request trace through the scheduler under a virtual clock. No model runs: a step takes "
        "the time that the three --step-... flags say.",
    )
    parser.add_argument("file", metavar="FILE", help="the trace: Mooncake's JSON lines or Azure's CSV")
    parser.add_argument(
        "--format",
        dest="trace_format",
        choices=("auto", "mooncake", "azure"),
        default="auto",
        help="format of the trace (default: detected)",
    )
    parser.add_argument("--limit", type=whole_number(1), metavar="N", help="replay the first N requests")
    numbers = (
        ("--block-size", "16", "tokens per KV block"),
        ("--num-blocks", "16384", "KV blocks in the pool"),
        ("--max-num-seqs", "256", "most running requests"),
        ("--max-num-batched-tokens", "8192", "most tokens per step"),
    )
    for flag, default, text in numbers:
        parser.add_argument(
            flag, type=whole_number(0), default=default, metavar="N", help=f"{text} (default: {default})"
        )
    parser.add_argument(
        "--no-enable-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        help="do not let requests share the KV blocks of a prefix",
    )
    times = (
        ("--step-base-us", "every step"),
        ("--step-per-token-us", "each token of a step"),
        ("--step-per-context-token-us", "each token of context that a step attends to"),
    )
    for flag, text in times:
        parser.add_argument(
            flag, type=microseconds, metavar="US", help=f"microseconds for {text} (default: see the report)"
        )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def bench_trace(argv: Sequence[str]) -> int:
    """Run ``rustvllm bench trace``.

    Returns:
        The exit code 0.

    Raises:
        ConfigError: The core is a debug build.
        TraceError: The trace cannot be read.
        ValueError: A number is outside its limits.
    """
    parser = make_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.refuse_unknown(unknown)
    require_release_build()
    options = {name: value for name, value in vars(args).items() if name not in {"file", "json"}}
    report: dict[str, Any] = {
        "machine": machine(),
        "versions": versions(),
        "build_profile": _core.build_profile,
        "trace": args.file,
        **_core.bench_trace(args.file, **options),
    }
    print(json.dumps(report, indent=2) if args.json else summary(report))
    return 0


def summary(report: dict[str, Any]) -> str:
    """The report for people."""
    waits = ", ".join(f"{name} {seconds:.3f}" for name, seconds in report["queue_time_s"].items())
    refused = "".join(f", {count} refused: {reason}" for reason, count in report["refused"].items())
    model = report["step_time_model"]
    lines = {
        "trace": f"{report['trace']} ({report['format']}), {report['trace_s']:.0f} s",
        "requests": f"{report['requests']}{refused}",
        "pool": f"{report['num_blocks']} blocks of {report['block_size']} tokens",
        "steps": f"{report['steps']}, at most {report['max_num_running']} requests in one",
        "tokens": f"{report['scheduled_tokens']} computed, {report['output_tokens']} sampled",
        "control plane": f"{report['control_plane_s']:.3f} s (add {report['add_s']:.3f}, "
        f"schedule {report['schedule_s']:.3f}, update {report['update_s']:.3f}, drain {report['drain_s']:.3f})",
        "prefix hit rate": f"{100 * report['prefix_hit_rate']:.2f} % "
        f"({report['hit_blocks']} of {report['full_blocks']} full blocks)",
        "preemptions": str(report["preemptions"]),
        "queue time, s": waits,
        "virtual time": f"{report['virtual_s']:.0f} s, a step taking {model['base_us']:g} µs + "
        f"{model['per_token_us']:g} µs per token + {model['per_context_token_us']:g} µs per token of context",
    }
    return "\n".join(f"{name:<16} {text}" for name, text in lines.items())
