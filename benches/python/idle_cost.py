"""Measures what an idle server costs: the processor time of all its processes, and how fast it ends.

The script first sends some requests, so that everything that is created late exists; then it waits; then it sends one
request, to measure the first token after such a pause; then it sends SIGTERM.

    python benches/python/idle_cost.py --seconds 10 --output-json report.json
    python benches/python/idle_cost.py -- --model gpt2
"""

import argparse
import os
import signal
import statistics
import time
from typing import Any

from bench_report import add_common_flags, new_report, parse, publish
from measured_server import bench_serve, rustvllm_server

SETTLE_SECONDS = 2
USUAL_REQUESTS = 20


def measure(flags: list[str], mode: str, seconds: float) -> dict[str, Any]:
    """Measure one server from its start to its end."""
    with rustvllm_server(flags, mode) as server:
        usual = first_token_ms(server.url, USUAL_REQUESTS)
        time.sleep(SETTLE_SECONDS)
        before = server.processor_seconds()
        begin = time.monotonic()
        time.sleep(seconds)
        used = server.processor_seconds()
        used.subtract(before)
        duration = time.monotonic() - begin
        resident = server.resident_bytes()
        after = first_token_ms(server.url, 1)
        begin = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        code = server.process.wait(30)
        stop_seconds = time.monotonic() - begin
    return {
        "cores_percent": 100 * used.total() / duration,
        "cores_percent_by_thread": {name: 100 * s / duration for name, s in used.most_common() if s > 0},
        "usual_first_token_ms": usual,
        "first_token_after_ms": after,
        "resident_mb": {name: size / 1e6 for name, size in resident.items()},
        "ready_after_s": server.ready_after,
        "sigterm_s": stop_seconds,
        "exit_code": code,
        "load_average": os.getloadavg()[0],
    }


def first_token_ms(url: str, num_requests: int) -> float:
    """The median over ``num_requests`` requests, one after the other."""
    report = bench_serve(url, 1, num_requests, "--random-input-len", "16", "--random-output-len", "16")
    return float(report["p50_ttft_ms"])


def main() -> None:
    """Measure the engine in a process and in a thread in alternating turns, print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--modes", nargs="+", choices=["process", "thread"], default=["process", "thread"])
    add_common_flags(parser)
    args = parse(parser)
    runs: dict[str, list[dict[str, Any]]] = {}
    for _ in range(args.turns):
        for mode in args.modes:
            runs.setdefault(mode, []).append(measure(args.serve, mode, args.seconds))
    report = {
        **new_report(),
        "serve_arguments": args.serve,
        "median": {
            mode: {key: statistics.median(run[key] for run in of_mode) for key in ("cores_percent", "sigterm_s")}
            for mode, of_mode in runs.items()
        },
        "runs": runs,
    }
    publish(report, args.output_json)


if __name__ == "__main__":
    main()
