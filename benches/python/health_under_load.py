"""Measures how ``/health`` and running streams react to many streams and to a very long prompt.

The script opens streams of simulated steps, while another process constantly asks ``/health`` over new connections,
first without and then with a prompt of 200,000 characters every second. It reports percentiles of both, and how much
more the streams' gaps grew than the traced step times did.

    python benches/python/health_under_load.py --streams 500 --step-time 20 --output-json report.json
"""

import argparse
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self

import numpy as np
from bench_report import add_common_flags, new_report, parse, publish
from measured_server import MeasuredServer, bench_serve, rustvllm_server
from step_times import StepTimes
from tiny_checkpoint import write_tiny_llama
from tokenizer_folder import tokenizer_folder

TOKENIZER = tokenizer_folder("gpt2-tokenizer")
POSITIONS = 131_072
POLL_SECONDS = 0.02
TIMEOUT = 30
OPEN_SECONDS = 60
WORDS = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "thing",
    "life",
    "child",
    "world",
    "school",
    "state",
    "group",
    "country",
]


def ask(address: tuple[str, int], path: str) -> tuple[float, int]:
    """Seconds for one GET over its own connection, and the status."""
    begin = time.perf_counter()
    connection = http.client.HTTPConnection(*address, timeout=TIMEOUT)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
    finally:
        connection.close()
    return time.perf_counter() - begin, answer.status


def poll(url: str) -> None:
    """Run as the prober's process: query until standard input closes, then print times, durations and failures."""
    parts = urllib.parse.urlsplit(url)
    address = (parts.hostname or "", parts.port or 80)
    closed = threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.read()
        closed.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    asked, late, failures = [], [], []
    due = time.perf_counter()
    while not closed.is_set():
        # If a query takes longer than the interval, the next one starts at once.
        due = max(due + POLL_SECONDS, time.perf_counter())
        time.sleep(max(0.0, due - time.perf_counter()))
        late.append(time.perf_counter() - due)
        begin = time.monotonic()
        try:
            took, status = ask(address, "/health")
            asked.append((begin, took))
        except OSError as error:
            failures.append(repr(error))
            continue
        failures += [f"HTTP status {status}"] if status != 200 else []
    json.dump({"asked": asked, "late": late, "failures": failures}, sys.stdout)


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Percentiles of times in seconds, in milliseconds."""
    values = np.array(seconds) * 1000 if len(seconds) else np.zeros(1)
    return {f"p{at:g}": float(np.percentile(values, at)) for at in (50, 90, 99, 99.9)} | {"max": float(values.max())}


@contextmanager
def polled(url: str, found: dict[str, Any]) -> Iterator[None]:
    """Query ``/health`` within the context; ``found`` gets the output of the prober's process."""
    command = [sys.executable, __file__, "--poll", url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as prober:
        try:
            yield
        finally:
            out, _ = prober.communicate(timeout=2 * TIMEOUT)
    found.update(json.loads(out))


def wait_until_all_run(server: MeasuredServer, streams: int) -> float:
    """Wait until all streams are open; returns the time (``time.monotonic``)."""
    deadline = time.monotonic() + OPEN_SECONDS
    while server.get("/load")["num_running"] < streams:
        if time.monotonic() > deadline:
            raise SystemExit(f"the {streams} streams did not all run within {OPEN_SECONDS} s; try a longer --seconds")
        time.sleep(0.05)
    return time.monotonic()


class LongPrompts:
    """Sends long prompts at a fixed interval, each a different one, so that no cache has it."""

    def __init__(self, url: str, characters: int, interval: float) -> None:
        self.seconds: list[float] = []
        self.prompt_tokens: list[int] = []
        self.failures: list[str] = []
        self._parts = urllib.parse.urlsplit(url)
        self._characters = characters
        self._interval = interval
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        source = random.Random(1)
        senders = []
        while not self._stopping.wait(self._interval):
            text = ""
            while len(text) < self._characters:
                text += " ".join(source.choices(WORDS, k=4000)) + ". "
            body = json.dumps({"prompt": text[: self._characters], "max_tokens": 1})
            senders.append(threading.Thread(target=self._send, args=(body,)))
            senders[-1].start()  # a slow one does not delay the next
        for sender in senders:
            sender.join()

    def _send(self, body: str) -> None:
        begin = time.perf_counter()
        connection = http.client.HTTPConnection(self._parts.hostname or "", self._parts.port, timeout=120)
        try:
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            if answer.status != 200:
                self.failures.append(f"{answer.status}: {text[:200].decode(errors='replace')}")
                return
            self.prompt_tokens.append(json.loads(text)["usage"]["prompt_tokens"])
            self.seconds.append(time.perf_counter() - begin)
        except (OSError, http.client.HTTPException) as error:
            self.failures.append(repr(error))
        finally:
            connection.close()


def measure(server: MeasuredServer, args: argparse.Namespace, *, long_prompts: bool) -> dict[str, Any]:
    """One run: all streams from start to end. Queries while the streams are being opened are counted separately."""
    output_len = max(2, round(args.seconds * 1000 / args.step_time))
    lengths = ["--random-input-len", "32", "--random-output-len", str(output_len)]
    health: dict[str, Any] = {}
    found: dict[str, Any] = {"long_prompts": long_prompts}
    before = server.processor_seconds()
    prompts = LongPrompts(server.url, args.characters, args.interval)
    with polled(server.url, health), ThreadPoolExecutor(1) as pool:
        load = pool.submit(
            bench_serve, server.url, args.streams, args.streams, *lengths, "--metric-percentiles", "50,99,99.9"
        )
        begin = wait_until_all_run(server, args.streams)
        with prompts if long_prompts else nullcontext():
            wait([load], timeout=max(1.0, args.seconds * 0.8))
            end = time.monotonic()
        report = load.result()
    if long_prompts:
        found |= {
            "long_prompt_tokens": statistics.median(prompts.prompt_tokens) if prompts.prompt_tokens else None,
            "long_prompts_answered": len(prompts.seconds),
            "long_prompts_failed": prompts.failures[:5],
            "long_prompt_ms": percentiles(prompts.seconds),
        }
    found["health"] = {
        "count": len(health["asked"]),
        "failures": health["failures"][:5],
        "ms": percentiles([took for at, took in health["asked"] if begin <= at <= end]),
        "ms_while_opening": percentiles([took for at, took in health["asked"] if at < begin]),
        "own_delay_ms": percentiles(health["late"]),
    }
    used = server.processor_seconds()
    used.subtract(before)
    keys = [f"{at}_{name}_ms" for name in ("itl", "ttft") for at in ("p50", "p99", "p99.9")]
    found |= {
        **{key: report[key] for key in keys},
        **{
            key: report[key]
            for key in (
                "completed",
                "failed",
                "errors_by_kind",
                "output_throughput",
                "tokens_per_event",
                "duration",
                "client_load",
            )
        },
        "server_cores": used.total() / report["duration"],
        "server_cores_by_thread": {name: seconds / report["duration"] for name, seconds in used.most_common(6)},
        "load_average": os.getloadavg()[0],
        "window_ns": [round(begin * 1e9), round(end * 1e9)],
    }
    return found


def main() -> None:
    """Measure without and with long prompts in alternating turns, print JSON."""
    if sys.argv[1:2] == ["--poll"]:
        poll(sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--step-time", type=float, default=20.0, help="milliseconds of a simulated step")
    parser.add_argument("--characters", type=int, default=200_000, help="of a long prompt")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between long prompts")
    parser.add_argument("--seconds", type=float, default=20.0, help="that the streams last, about")
    parser.add_argument("--turns", type=int, default=2, help="runs of each kind")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER)
    parser.add_argument("--no-step-trace", action="store_true", help="for a server without --step-trace-file")
    add_common_flags(parser)
    args = parse(parser)
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_llama(
            Path(folder) / "model", args.tokenizer, num_layers=1, max_position_embeddings=POSITIONS
        )
        trace = Path(folder) / "steps.jsonl"
        flags = ["--model", str(model), "--executor", "sim", "--sim-step-time", f"{args.step_time:g}"]
        flags += ["--max-num-seqs", str(args.streams + 12), "--num-gpu-blocks-override", "65536"]
        flags += [] if args.no_step_trace else ["--step-trace-file", str(trace)]
        with rustvllm_server([*flags, *args.serve], args.mode) as server:
            bench_serve(server.url, 16, 32, "--random-input-len", "32", "--random-output-len", "16")
            runs = [measure(server, args, long_prompts=kind) for _ in range(args.turns) for kind in (False, True)]
        if not args.no_step_trace:
            steps = StepTimes.read(trace)
            for run in runs:
                within = steps.between(*run["window_ns"])
                run["steps"] = {"count": int(within.done.size), "ms": percentiles((within.duration / 1e9).tolist())}
    report = {
        **new_report(),
        "mode": args.mode,
        "streams": args.streams,
        "step_time_ms": args.step_time,
        "characters": args.characters,
        "runs": runs,
        **summary(runs),
    }
    publish(report, args.output_json)


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over the turns, and the effect of long prompts."""
    found: dict[str, Any] = {}
    for kind, name in ((False, "without"), (True, "with")):
        those = [run for run in runs if run["long_prompts"] is kind]
        found[f"health_p99_ms_{name}"] = statistics.median(run["health"]["ms"]["p99"] for run in those)
        found[f"itl_p99_ms_{name}"] = statistics.median(run["p99_itl_ms"] for run in those)
        if "steps" in those[0]:
            found[f"step_p99_ms_{name}"] = statistics.median(run["steps"]["ms"]["p99"] for run in those)
    found["itl_p99_growth_ms"] = found["itl_p99_ms_with"] - found["itl_p99_ms_without"]
    if "step_p99_ms_with" in found:
        growth = found["step_p99_ms_with"] - found["step_p99_ms_without"]
        found["itl_p99_growth_beyond_steps_ms"] = found["itl_p99_growth_ms"] - max(0.0, growth)
    return found


if __name__ == "__main__":
    main()
