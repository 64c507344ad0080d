"""Compares chat streams that are parsed for tool calls and reasoning with plain ones: tokens/s and processor time.

The steps are simulated, so the script measures the way from a token to its event. Scenes alternate:

    plain     no parsing
    calls     ``tools`` that may be called, without constraints (``--tool-call-constraint off``)
    syntax    like calls, with a grammar of text with calls in each step (``--tool-call-constraint syntax``)
    thoughts  the whole answer is reasoning, which each delta has in two fields

    python benches/python/turn_streams.py --streams 64 --step-ms 0 --turns 3
"""

import argparse
import json
import statistics
import sys
from contextlib import ExitStack
from typing import Any

from bench_report import add_common_flags, new_report, parse, publish
from measured_server import MeasuredServer, bench_serve, rustvllm_server

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}]
FREE, SYNTAX = "--tool-call-constraint=off", "--tool-call-constraint=syntax"
SCENES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "plain": ((), {}),
    "calls": (("--tool-call-parser=hermes", FREE), {"tools": TOOLS}),
    "syntax": (("--tool-call-parser=hermes", SYNTAX), {"tools": TOOLS}),
    "thoughts": (("--reasoning-parser=deepseek_r1",), {}),
}


def measure(server: MeasuredServer, fields: dict[str, Any], num_requests: int, args: argparse.Namespace) -> Any:
    """One run: tokens/s, and microseconds of the server's processor time per token."""
    flags = ["--endpoint", "/v1/chat/completions", "--extra-body", json.dumps(fields)]
    flags += ["--random-input-len", "16", "--random-output-len", str(args.output_len)]
    before = server.processor_seconds()
    report = bench_serve(server.url, args.streams, num_requests, *flags)
    used = server.processor_seconds()
    used.subtract(before)
    if report["failed"]:
        raise SystemExit(f"{report['failed']} requests failed: {report['errors_by_kind']}")
    tokens = report["total_output_tokens"]
    return {
        "tokens_per_second": report["output_throughput"],
        "tokens_per_event": report["tokens_per_event"],
        "server_cpu_us_per_token": 1e6 * sum(used.values()) / tokens,
    }


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Alternate runs of all scenes; compares each one's tokens/s with that of the plain streams of its turn."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in args.scenes}
    with ExitStack() as stack:
        base = ["--executor", "sim", "--max-num-seqs", "256", "--sim-step-time", f"{args.step_ms:g}"]
        servers = {
            name: stack.enter_context(rustvllm_server([*base, *SCENES[name][0], *args.serve], args.mode))
            for name in args.scenes
        }
        for name in args.scenes:
            measure(servers[name], SCENES[name][1], args.streams, args)
        for _ in range(args.turns):
            for name in args.scenes:
                run = measure(servers[name], SCENES[name][1], args.requests, args)
                runs[name].append(run)
                print(name, json.dumps(run), file=sys.stderr, flush=True)
    report: dict[str, Any] = {}
    for name, of_scene in runs.items():
        shares = [
            run["tokens_per_second"] / plain["tokens_per_second"]
            for run, plain in zip(of_scene, runs["plain"], strict=True)
        ]
        report[name] = {key: round(statistics.median(run[key] for run in of_scene), 2) for key in of_scene[0]} | {
            "share_of_plain": {"median": round(statistics.median(shares), 3), "all": [round(s, 3) for s in shares]}
        }
    return report


def main() -> None:
    """Measure and publish the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64, help="at a time")
    parser.add_argument("--requests", type=int, default=128, help="of a run")
    parser.add_argument("--output-len", type=int, default=400, help="tokens of an answer")
    parser.add_argument("--step-ms", type=float, default=0.0, help="milliseconds of a step")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--scenes", type=lambda text: text.split(","), default=list(SCENES), help="(default: all)")
    add_common_flags(parser)
    args = parse(parser)
    if "plain" not in args.scenes or not set(args.scenes) <= set(SCENES):
        parser.error(f"scenes are plain and any of {', '.join(SCENES)}")
    settings = {"streams": args.streams, "step_ms": args.step_ms}
    publish({**new_report(), **settings, "scenes": compare(args)}, args.output_json)


if __name__ == "__main__":
    main()
