"""Measures the serving path without a model: ``rustvllm serve --executor sim`` under ``rustvllm bench serve``.

The script reads the server's processor time per streamed token from /proc, by process and thread. Server and client
share the machine, so throughput is that of both; processor time is the server's alone. Sections of the report:

    bare     the ratio of the same load on rustvllm and on a FastAPI stream that does nothing else, alternating
    cost     more concurrencies and step times
    alone    one request at a time: what the stack adds to the first token and to each later one
    scaling  ``--api-server-count``

    python benches/python/serving_cost.py --sections bare,alone --output-json report.json
    python benches/python/serving_cost.py --sections cost --concurrency 1,64 --step-time 0,5 --mode process
    python benches/python/serving_cost.py --sections cost -- --max-num-batched-tokens 512    # flags of rustvllm serve
"""

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench_report import add_common_flags, new_report, numbers, parse, publish, whole_numbers
from measured_server import MeasuredServer, bench_serve, rustvllm_server

BARE = [sys.executable, str(Path(__file__).with_name("bare_stream.py"))]
SECTIONS = ("bare", "cost", "alone", "scaling")
INPUT_LEN = 32


def simulation(step_time: float, args: argparse.Namespace, *more: str) -> MeasuredServer:
    """A server with simulated steps."""
    flags = ["--executor", "sim", "--max-num-seqs", "256", "--sim-step-time", f"{step_time:g}"]
    return rustvllm_server([*flags, *args.serve, *more], args.mode)


def measure(server: MeasuredServer, concurrency: int, tokens: int, output_len: int) -> dict[str, Any]:
    """Measure one row."""
    lengths = ["--random-input-len", str(INPUT_LEN), "--random-output-len", str(output_len)]
    bench_serve(server.url, concurrency, concurrency * 2, *lengths)  # warms up
    before = server.processor_seconds()
    report = bench_serve(server.url, concurrency, max(concurrency * 2, tokens // output_len), *lengths)
    used = server.processor_seconds()
    used.subtract(before)
    per_token = {
        name: 1e6 * seconds / report["total_output_tokens"] for name, seconds in used.most_common() if seconds > 0
    }
    return {
        "concurrency": concurrency,
        "failed": report["failed"],
        "errors_by_kind": report["errors_by_kind"],
        "total_output_tokens": report["total_output_tokens"],
        "output_throughput": report["output_throughput"],
        "event_throughput": report["event_throughput"],
        "tokens_per_event": report["tokens_per_event"],
        **{f"{kind}_{name}_ms": report[f"{kind}_{name}_ms"] for name in ("ttft", "itl") for kind in ("p50", "p99")},
        "server_cpu_us_per_token": sum(per_token.values()),
        "server_cpu_us_per_event": sum(per_token.values()) * report["tokens_per_event"],
        "server_cpu_us_per_token_by_thread": per_token,
        "server_cores": used.total() / report["duration"],
        "client_load": report["client_load"],
        "load_average": os.getloadavg()[0],
    }


def tokens_of(concurrency: int, step_time: float, most: int) -> int:
    """The number of tokens of a run: at most what ten seconds bring, because single streams would take minutes."""
    return int(min(most, 10 * concurrency * 1000 / max(step_time, 0.05)))


def against_bare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Alternate the bare server and rustvllm, with the ratios turn by turn: one row per concurrency.

    A pause between steps costs a bare stream, too (each task sleeps, and is woken for each event), so rustvllm is also
    compared with a bare server of the same steps.
    """
    rows = []
    with ExitStack() as stack:
        servers = {"bare": (stack.enter_context(MeasuredServer(BARE)), 0.0)}
        for step in args.step_time:
            if step:
                paced = stack.enter_context(MeasuredServer([*BARE, "--step-time", str(step)]))
                servers[f"bare, step {step:g} ms"] = (paced, step)
            servers[f"step {step:g} ms"] = (stack.enter_context(simulation(step, args)), step)
        for concurrency in args.concurrency:
            runs: dict[str, list[dict[str, Any]]] = {}
            for _ in range(args.turns):
                for name, (server, step) in servers.items():
                    run = measure(server, concurrency, tokens_of(concurrency, step, args.tokens), args.output_len)
                    runs.setdefault(name, []).append(run)
                    show(name, run)
            rows.append({"concurrency": concurrency, "runs": runs, "ratios": ratios_to_bare(runs)})
    return rows


def ratios_to_bare(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Our cost over the bare server's, turn by turn: per token (an event may have several) and per event."""
    found = {}
    for name, ours in runs.items():
        if name.startswith("bare"):
            continue
        bare = runs.get(f"bare, {name}", runs["bare"])
        costs = {"per_token": "server_cpu_us_per_token", "per_event": "server_cpu_us_per_event"}
        found[name] = {
            unit: spread([a[key] / b["server_cpu_us_per_event"] for a, b in zip(ours, runs["bare"], strict=True)])
            for unit, key in costs.items()
        }
        found[name]["per_event_same_steps"] = spread(
            [a[costs["per_event"]] / b[costs["per_event"]] for a, b in zip(ours, bare, strict=True)]
        )
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and extremes."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def every_cost(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every step time at every concurrency."""
    rows = []
    for step_time in args.step_time:
        with simulation(step_time, args) as server:
            for concurrency in args.concurrency:
                tokens = tokens_of(concurrency, step_time, args.tokens)
                run = measure(server, concurrency, tokens, args.output_len)
                rows.append({"step_time_ms": step_time, **run})
                show(f"step {step_time:g} ms", run)
    return rows


def alone(args: argparse.Namespace) -> dict[str, Any]:
    """Measure one request at a time without step time, so that the stack adds all of it."""
    with simulation(0, args) as server:
        lengths = ["--random-input-len", str(INPUT_LEN), "--random-output-len", "16"]
        bench_serve(server.url, 1, 50, *lengths)
        report = bench_serve(server.url, 1, args.requests_alone, *lengths)
    names = [f"{kind}_{metric}_ms" for metric in ("ttft", "itl", "e2el") for kind in ("p50", "p99")]
    found = {name: report[name] for name in names} | {"completed": report["completed"], "failed": report["failed"]}
    print(f"alone: TTFT p50 {found['p50_ttft_ms']:.2f} p99 {found['p99_ttft_ms']:.2f} ms", file=sys.stderr, flush=True)
    return {**found, "output_len": 16, "load_average": os.getloadavg()[0]}


def scaling(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure throughput and cost with one, two, … API processes, in alternating turns."""
    rows = []
    with ExitStack() as stack:
        servers = {
            count: stack.enter_context(simulation(0, args, "--api-server-count", str(count)))
            for count in args.api_server_count
        }
        for concurrency in args.concurrency:
            for turn in range(args.turns):
                for count, server in servers.items():
                    run = measure(server, concurrency, tokens_of(concurrency, 0, args.tokens), args.output_len)
                    rows.append({"api_server_count": count, "turn": turn, **run})
                    show(f"{count} API", run)
    return rows


def show(name: str, row: Mapping[str, Any]) -> None:
    """Print one row as text."""
    by_thread = ", ".join(
        f"{thread} {us:.1f}" for thread, us in row["server_cpu_us_per_token_by_thread"].items() if us >= 0.05
    )
    line = (
        f"{name:<10} {row['concurrency']:>3} streams: {row['output_throughput']:>7.0f} tok/s, "
        f"{row['tokens_per_event']:.2f} tok/event, TTFT p50 {row['p50_ttft_ms']:.2f} p99 {row['p99_ttft_ms']:.2f}, "
        f"ITL p50 {row['p50_itl_ms']:.2f} p99 {row['p99_itl_ms']:.2f} ms, "
        f"server {row['server_cpu_us_per_token']:.1f} us/tok {row['server_cpu_us_per_event']:.1f} us/event "
        f"({by_thread}), client {row['client_load']:.2f}"
    )
    print(line, file=sys.stderr, flush=True)


def table(report: Mapping[str, Any]) -> str:
    """The comparison with the bare server as a table for a document: medians of the turns."""
    head = "| | streams | tokens/s | tokens per event | us per token | us per event | token ÷ bare event | event ÷ |"
    lines = [head + " event ÷ same steps |", "|---|---:|" + "---:|" * 7]
    for row in report.get("bare", []):
        for name, runs in row["runs"].items():
            middle = {
                key: statistics.median(run[key] for run in runs)
                for key in runs[0]
                if key.startswith("server_cpu_us_per") and not key.endswith("thread")
            }
            speed = statistics.median(run["output_throughput"] for run in runs)
            merged = statistics.median(run["tokens_per_event"] for run in runs)
            ratio = row["ratios"].get(name)
            units = ("per_token", "per_event", "per_event_same_steps")
            ends = ["" if ratio is None else f"{ratio[unit]['median']:.2f}" for unit in units]
            costs = [f"{middle[f'server_cpu_us_per_{unit}']:.1f}" for unit in ("token", "event")]
            cells = [name, str(row["concurrency"]), f"{speed:.0f}", f"{merged:.2f}", *costs, *ends]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure the chosen sections and print JSON; rows go to standard error as they come."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sections", default="bare,alone", help=f"of {','.join(SECTIONS)} (default: bare,alone)")
    parser.add_argument("--concurrency", type=whole_numbers, default=[1, 16, 64, 256])
    parser.add_argument("--step-time", type=numbers, default=[0.0, 5.0], help="milliseconds of a simulated step")
    parser.add_argument("--tokens", type=int, default=100_000, help="tokens of a run, about")
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--turns", type=int, default=3, help="of bare and of scaling (default: 3)")
    parser.add_argument("--requests-alone", type=int, default=1000)
    parser.add_argument("--api-server-count", type=whole_numbers, default=[1, 2])
    add_common_flags(parser)
    args = parse(parser)
    wanted = args.sections.split(",")
    if unknown := set(wanted) - set(SECTIONS):
        parser.error(f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    report: dict[str, Any] = {**new_report(), "mode": args.mode, "serve_arguments": args.serve}
    for name, section in zip(SECTIONS, (against_bare, every_cost, alone, scaling), strict=True):
        if name in wanted:
            report[name] = section(args)
    publish(report, args.output_json)
    if "bare" in wanted:
        print(table(report), file=sys.stderr)


if __name__ == "__main__":
    main()
