"""``rustvllm bench startup``: how long ``rustvllm serve`` takes until it listens, is ready, and answers."""

import http.client
import json
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from rustvllm import _core
from rustvllm.cli.bench.arguments import seconds, whole_number
from rustvllm.cli.bench.report.machine import machine, require_release_build, versions
from rustvllm.cli.parser import FlexibleArgumentParser
from rustvllm.exceptions import RequestFailedError

PHASES: Final = {
    "listening": "the process runs and /health answers",
    "ready": "the model is loaded",
    "first_token": "one token was asked for and is there",
}
PROGRAM: Final = "rustvllm bench startup"
STOP_SECONDS: Final = 30


def make_parser() -> FlexibleArgumentParser:
    """The parser of ``rustvllm bench startup``."""
    parser = FlexibleArgumentParser(
        prog=PROGRAM,
        usage="rustvllm bench startup [flags] [-- MODEL and flags of rustvllm serve]",
        description="Start `rustvllm serve` several times, one after the other, and measure seconds from the start of "
        "the process. The first start may find files that are not in memory yet; it is reported apart.",
    )
    parser.add_argument(
        "--num-iters", type=whole_number(1, 1000), default="5", metavar="N", help="starts measured (default: 5)"
    )
    parser.add_argument(
        "--timeout", type=seconds, default=600.0, metavar="S", help="longest time of a start in seconds (default: 600)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def bench_startup(argv: Sequence[str]) -> int:
    """Run ``rustvllm bench startup``.

    Returns:
        The exit code 0.

    Raises:
        ConfigError: The core is a debug build.
        RequestFailedError: A server did not start, or did not answer.
    """
    own, served = list(argv), []
    if "--" in own:
        place = own.index("--")
        own, served = own[:place], own[place + 1 :]
    parser = make_parser()
    args, unknown = parser.parse_known_args(own)
    if unknown:
        parser.refuse_unknown(unknown)
    require_release_build()
    starts = []
    for turn in range(args.num_iters + 1):
        starts.append(start_once(served, args.timeout))
        seconds_of = ", ".join(f"{phase} {taken:.2f} s" for phase, taken in starts[-1].items())
        name = f"start {turn} of {args.num_iters}" if turn else "first start"
        print(f"{PROGRAM}: {name}: {seconds_of}", file=sys.stderr, flush=True)
    first, measured = starts[0], starts[1:]
    report: dict[str, Any] = {
        "machine": machine(),
        "versions": versions(),
        "build_profile": _core.build_profile,
        "serve_arguments": served,
        "num_iters": args.num_iters,
        "first_start_s": first,
        "starts_s": measured,
        "median_s": {phase: statistics.median(start[phase] for start in measured) for phase in PHASES},
    }
    print(json.dumps(report, indent=2) if args.json else summary(report))
    return 0


def start_once(served: Sequence[str], timeout: float) -> dict[str, float]:
    """Seconds from the start of one server to each of :data:`PHASES`.

    Raises:
        RequestFailedError: It ended before, or took too long; says what it printed last.
    """
    command = [sys.executable, "-m", "rustvllm.cli.main", "serve", *served, "--port", "0"]
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        watchdog = threading.Timer(timeout, process.kill)
        watchdog.start()
        try:
            times: dict[str, float] = {}
            address = last = ""
            for line in process.stdout or ():
                last = line.strip() or last
                if "listening on http://" in line:
                    times["listening"] = time.perf_counter() - begin
                    address = line.split("listening on http://")[1].split(",")[0]
                elif "ready, serving" in line:
                    times["ready"] = time.perf_counter() - begin
                    break
            if "ready" not in times:
                raise RequestFailedError(
                    f"`rustvllm serve {' '.join(served)}` did not become ready; its last output: {last}"
                )
            _ask_for_a_token(address)
            times["first_token"] = time.perf_counter() - begin
        finally:
            watchdog.cancel()
            process.send_signal(signal.SIGTERM)
            try:
                process.communicate(timeout=STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
    return times


def _ask_for_a_token(address: str) -> None:
    connection = http.client.HTTPConnection(address, timeout=STOP_SECONDS)
    try:
        body = json.dumps({"prompt": [5], "max_tokens": 1})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise RequestFailedError(f"the server was ready but answered HTTP status {answer.status}: {text[:200]}")


def summary(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"{'seconds until':<14} {'median of ' + str(report['num_iters']):>12} {'first start':>12}"]
    for phase, text in PHASES.items():
        lines.append(f"{phase:<14} {report['median_s'][phase]:>12.2f} {report['first_start_s'][phase]:>12.2f}   {text}")
    return "\n".join(lines)
