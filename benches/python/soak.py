"""Runs a long mixed load against simulated steps: gaps between tokens, memory, and what is left at the end.

The load has streams and whole answers, short and long, with one choice and several, and with stop strings; clients cut
some of them off at a random time. The script notes the arrival of each event. From the gap between two events of a
choice it subtracts the time of the traced steps that made its tokens; the stack, the machine and this client added the
rest.

    python benches/python/soak.py --minutes 10 --output-json report.json
    python benches/python/soak.py --minutes 2 --preempt    # a KV cache too small for the load
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
import urllib.parse
from array import array
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from bench_report import add_common_flags, new_report, parse, publish
from measured_server import MeasuredServer, rustvllm_server
from step_times import StepTimes
from tiny_checkpoint import write_tiny_llama
from tokenizer_folder import tokenizer_folder

TOKENIZER = tokenizer_folder("gpt2-tokenizer")
POSITIONS = 8192
BLOCK_SIZE = 16
SAMPLE_SECONDS = 2.0
LAG_SECONDS = 0.005
REQUEST_SECONDS = 120
DRAIN_SECONDS = 60
PERCENTILES = (50, 90, 99, 99.9, 99.99)


class Gaps:
    """Gaps between events of one choice: the times of both events, and how many tokens the later one brought."""

    def __init__(self) -> None:
        self.begin, self.end, self.tokens = array("q"), array("q"), array("q")

    def add(self, begin: int, end: int, tokens: int) -> None:
        """Add a gap; times of CLOCK_MONOTONIC in nanoseconds."""
        self.begin.append(begin)
        self.end.append(end)
        self.tokens.append(tokens)

    def beyond(self, steps: StepTimes) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Each gap minus the steps that explain it, in nanoseconds."""
        begin, end, tokens = (np.array(values, np.int64) for values in (self.begin, self.end, self.tokens))
        return end - begin - steps.longest_within(begin, end, tokens)


class Load:
    """Workers that send one random request after the other until they are stopped.

    Attributes:
        counts: Numbers of requests by their kind and how they ended.
        errors: The first few errors, in full.
    """

    def __init__(self, url: str, seed: int) -> None:
        parts = urllib.parse.urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._seed = seed
        self.stopping = asyncio.Event()
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self.gaps = Gaps()
        self.lag = array("d")
        self.tokens = 0

    async def worker(self, number: int) -> None:
        """Run one client."""
        source = random.Random(self._seed * 1000 + number)
        while not self.stopping.is_set():
            body, abort_after = request(source)
            kind = "stream" if body["stream"] else "whole"
            try:
                async with asyncio.timeout(REQUEST_SECONDS):
                    ended = await self._send(body, abort_after)
            except TimeoutError:
                ended = f"error: no end after {REQUEST_SECONDS} s"
            except (OSError, asyncio.IncompleteReadError, ValueError, KeyError) as error:
                ended = f"error: {error!r}"
            if ended.startswith("error"):
                self.errors += [ended] if len(self.errors) < 20 else []
                ended = ended[:60]
            self.counts[f"{kind} {ended}"] += 1

    async def _send(self, body: dict[str, Any], abort_after: float | None) -> str:
        content = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
        try:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode() + content)
            if abort_after is None:
                return await self._answer(reader, body)
            try:
                async with asyncio.timeout(abort_after):
                    return await self._answer(reader, body)
            except TimeoutError:
                writer.transport.abort()
                return "cut off"
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, body: dict[str, Any]) -> str:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        status = head.split(" ", 2)[1]
        if status != "200":
            return f"error: HTTP {status} {(await reader.read(300)).decode(errors='replace')}"
        if body["stream"]:
            return await self._events(reader, body["n"])
        content = b"".join([part async for part in chunks(reader)]) if "chunked" in head else await reader.read()
        answer = json.loads(content)
        reasons = [choice["finish_reason"] for choice in answer["choices"]]
        if len(reasons) != body["n"] or not all(reasons):
            return f"error: choices ended with {reasons} of n={body['n']}"
        self.tokens += answer["usage"]["completion_tokens"]
        return "done"

    async def _events(self, reader: asyncio.StreamReader, num_choices: int) -> str:
        last: dict[int, int] = {}
        finished: set[int] = set()
        rest = b""
        async for part in chunks(reader):
            now = time.monotonic_ns()
            *events, rest = (rest + part).split(b"\n\n")
            for event in events:
                if event == b"data: [DONE]":
                    return "done" if len(finished) == num_choices else f"error: {len(finished)} of {num_choices} ended"
                if event.startswith(b":"):
                    continue  # a comment, which a silent stream sends
                if not event.startswith(b"data: "):
                    return f"error: not an event: {event[:100]!r}"
                chunk = json.loads(event[6:])
                if "error" in chunk:
                    return f"error: in the stream: {chunk['error']}"
                for choice in chunk["choices"]:
                    index = choice["index"]
                    # A simulated answer has as many words as spaces, except for one at the very beginning.
                    tokens = choice["text"].count(" ") or int(bool(choice["text"]))
                    if tokens:
                        self.tokens += tokens
                        if index in last:
                            self.gaps.add(last[index], now, tokens)
                        last[index] = now
                    if choice["finish_reason"]:
                        finished.add(index)
        return "error: the stream ended without [DONE]"

    async def measure_lag(self) -> None:
        """Measure how late this client's own event loop is, which is part of every gap."""
        while not self.stopping.is_set():
            due = time.monotonic() + LAG_SECONDS
            await asyncio.sleep(LAG_SECONDS)
            self.lag.append((time.monotonic() - due) * 1000)


async def chunks(reader: asyncio.StreamReader) -> Any:
    """The parts of a chunked body, as they come."""
    while size := int((await reader.readline()).strip() or b"0", 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)


def request(source: random.Random) -> tuple[dict[str, Any], float | None]:
    """A body, and the seconds after which its client disconnects."""
    is_long = source.random() < 0.15
    prompt_len = source.randint(500, 4000) if is_long else source.randint(4, 100)
    num_choices = source.choice([2, 3, 4]) if source.random() < 0.15 else 1
    body: dict[str, Any] = {
        "prompt": [source.randrange(1000, 20000) for _ in range(prompt_len)],
        "max_tokens": source.randint(200, 1000) if source.random() < 0.2 else source.randint(1, 100),
        "stream": source.random() < 0.8,
        "n": num_choices,
        "temperature": 1 if num_choices > 1 else source.choice([0, 1]),
        "seed": source.randrange(1 << 30),
    }
    if source.random() < 0.25:
        body["stop"] = [f" {a}{b}" for a, b in (source.choices("abcdefghilmnoprstuw", k=2) for _ in range(3))]
    return body, source.uniform(0, 1.5) if source.random() < 0.15 else None


async def run(server: MeasuredServer, args: argparse.Namespace) -> tuple[Load, list[dict[str, Any]]]:
    """Run all workers for the given time, and sample every process's memory now and then."""
    load = Load(server.url, args.seed)
    begin = time.monotonic()
    samples = []
    async with asyncio.TaskGroup() as group:
        for number in range(args.clients):
            group.create_task(load.worker(number))
        group.create_task(load.measure_lag())
        while time.monotonic() - begin < args.minutes * 60:
            await asyncio.sleep(SAMPLE_SECONDS)
            samples.append({"seconds": time.monotonic() - begin, "resident_bytes": server.resident_bytes()})
        load.stopping.set()
    return load, samples


def what_is_left(server: MeasuredServer) -> dict[str, Any]:
    """The engine's counters once everything has ended; waits a while for the requests aborted last."""
    deadline = time.monotonic() + DRAIN_SECONDS
    while True:
        left: dict[str, Any] = server.get("/load")
        is_idle = left["num_running"] == left["num_waiting"] == left["kv_cache_usage"] == left["server_load"] == 0
        if is_idle or time.monotonic() > deadline:
            return {"is_clean": is_idle, **left}
        time.sleep(0.1)


def memory(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """For each process, in MB: the first sample, the medians of the fourth and the last tenth of the run, and the peak.

    Buffers and pools reach their size in the first minutes; memory that grows later grows without end.
    """
    found = {}
    tenth = max(1, len(samples) // 10)
    for name in samples[-1]["resident_bytes"]:
        series = np.array([sample["resident_bytes"].get(name, 0) for sample in samples]) / 1e6
        start = min(3 * tenth, len(series) - 1)
        early, late = float(np.median(series[start : start + tenth])), float(np.median(series[-tenth:]))
        found[name] = {"first_mb": series[0], "early_mb": early, "late_mb": late, "growth_mb": late - early}
        found[name]["max_mb"] = float(series.max())
    return found


def percentiles(values: Any) -> dict[str, float]:
    """Percentiles for a report."""
    if len(values) == 0:
        return {}
    return {f"p{at:g}": float(np.percentile(values, at)) for at in PERCENTILES} | {"max": float(np.max(values))}


def main() -> None:
    """Run and print JSON; the exit code is 1 if something was left over or went wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=32, help="requests open at a time")
    parser.add_argument("--step-time", type=float, default=8.0, help="milliseconds of a simulated step")
    parser.add_argument("--time-per-token", type=float, default=0.002, help="milliseconds for each token of it")
    parser.add_argument("--preempt", action="store_true", help="a KV cache that is too small")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER)
    parser.add_argument("--log", type=Path, help="what the server prints goes there")
    add_common_flags(parser)
    args = parse(parser)
    num_blocks = POSITIONS // BLOCK_SIZE * 2 if args.preempt else 1 << 16
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_llama(
            Path(folder) / "model", args.tokenizer, num_layers=1, max_position_embeddings=POSITIONS
        )
        trace = Path(folder) / "steps.jsonl"
        flags = ["--model", str(model), "--executor", "sim", "--sim-step-time", f"{args.step_time:g}"]
        flags += ["--sim-time-per-token", f"{args.time_per_token:g}", "--step-trace-file", str(trace)]
        flags += ["--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", str(num_blocks + 1)]
        with rustvllm_server([*flags, *args.serve], args.mode, args.log) as server:
            cpu_before, begin = server.processor_seconds(), time.monotonic()
            own_before = time.process_time()
            load, samples = asyncio.run(run(server, args))
            duration = time.monotonic() - begin
            used = server.processor_seconds()
            used.subtract(cpu_before)
            left = what_is_left(server)
        steps = StepTimes.read(trace)
    gaps_ms = (np.array(load.gaps.end) - np.array(load.gaps.begin)) / 1e6
    report: dict[str, Any] = {
        **new_report(),
        "mode": args.mode,
        "duration_s": duration,
        "requests": dict(sorted(load.counts.items())),
        "errors": load.errors,
        "tokens_per_second": load.tokens / duration,
        "server_cores": used.total() / duration,
        "client_cores": (time.process_time() - own_before) / duration,
        "gaps": len(gaps_ms),
        "gap_ms": percentiles(gaps_ms),
        "gap_less_steps_ms": percentiles(load.gaps.beyond(steps) / 1e6),
        "step_ms": percentiles(steps.duration / 1e6),
        "steps": int(steps.done.size),
        "client_lag_ms": percentiles(load.lag),
        "memory": memory(samples),
        "memory_samples": samples[:: max(1, len(samples) // 20)],
        "left": left,
    }
    publish(report, args.output_json)
    if problem := what_is_wrong(report):
        sys.exit(problem)


def what_is_wrong(report: Mapping[str, Any]) -> str:
    """Faults that a slow machine cannot excuse; empty if there are none."""
    if report["errors"]:
        return f"requests failed: {report['errors'][0]}"
    if not report["left"]["is_clean"]:
        return f"something is left: {report['left']}"
    return ""


if __name__ == "__main__":
    main()
