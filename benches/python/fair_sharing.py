"""Measures how long a small client waits during a flood: its time to first token under each scheduling policy.

Many clients with one key flood the server with long prompts; each sends its next request when it has its answer. One
client with another key sends small requests one after the other. Under ``priority``, the small requests have the higher
priority. The script reports percentiles of the small requests' time to first token, and the tokens per second of all
requests and of the flood alone.

    python benches/python/fair_sharing.py --clients 200 --num-prompts 600 --output-json report.json
"""

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any, Self

import numpy as np
from bench_report import add_common_flags, new_report, parse, publish
from measured_server import RUSTVLLM, rustvllm_server

FLOOD_KEY, SMALL_KEY = "key-of-the-flood", "key-of-the-small-client"
POLICIES = ("fcfs", "priority", "fair")
PAUSE_SECONDS = 0.05
TIMEOUT = 300


class SmallClient:
    """Sends small requests one after the other until its context ends; times are in seconds.

    Args:
        url: The server's URL.
        body: The body of each request.
    """

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        parts = urllib.parse.urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 80)
        self._body = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.waits: list[float] = []
        self.failures = 0
        self.num_tokens = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(PAUSE_SECONDS):
            try:
                if not self._others_wait():
                    continue
                wait = self.ask()
            except (OSError, http.client.HTTPException):
                wait = None
            if wait is None:
                self.failures += 1
            elif not self._stopping.is_set():  # a request that ran only because the flood ended says nothing
                self.waits.append(wait)

    def _others_wait(self) -> bool:
        """Whether the flood is running: before and after it, there is nothing to measure."""
        connection = http.client.HTTPConnection(*self._address, timeout=TIMEOUT)
        try:
            connection.request("GET", "/load", headers={"Authorization": f"Bearer {SMALL_KEY}"})
            return bool(json.load(connection.getresponse())["num_waiting"])
        finally:
            connection.close()

    def ask(self) -> float | None:
        """Seconds to the first event with text; None if there was none."""
        connection = http.client.HTTPConnection(*self._address, timeout=TIMEOUT)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {SMALL_KEY}"}
        first, began = None, time.perf_counter()
        try:
            connection.request("POST", "/v1/completions", self._body, headers)
            answer = connection.getresponse()
            while line := answer.readline():
                if not line.startswith(b"data: {"):
                    continue
                if first is None:
                    first = time.perf_counter() - began
                if usage := json.loads(line[len(b"data: ") :]).get("usage"):
                    self.num_tokens += usage["total_tokens"]
        finally:
            connection.close()
        return first


def flood(url: str, args: argparse.Namespace, extra: dict[str, Any]) -> dict[str, Any]:
    """Run ``rustvllm bench serve`` with the flood's key, and return its report."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        command = [*RUSTVLLM, "bench", "serve", "--base-url", url, "--max-concurrency", str(args.clients)]
        command += ["--num-prompts", str(args.num_prompts), "--ignore-eos", "--metric-percentiles", "50,99"]
        command += ["--random-input-len", str(args.input_len), "--random-output-len", str(args.output_len)]
        command += ["--extra-body", json.dumps(extra), "--output-json", file.name, "--disable-tqdm"]
        environment = {**os.environ, "RUSTVLLM_API_KEY": FLOOD_KEY}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        report: dict[str, Any] = json.load(file)
    return report


def measure(policy: str, args: argparse.Namespace) -> dict[str, Any]:
    """One run with a policy; times in milliseconds."""
    small_body: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 8, "ignore_eos": True}
    extra = {}
    if policy == "priority":
        small_body["priority"], extra["priority"] = 0, 1
    with tempfile.TemporaryDirectory() as directory:
        keys = Path(directory) / "keys"
        keys.write_text(f"{FLOOD_KEY} 1\n{SMALL_KEY} 1\n")
        flags = ["--scheduling-policy", policy, "--api-key-file", str(keys), *args.serve]
        with rustvllm_server(flags, args.mode) as server:
            client = SmallClient(server.url, small_body)
            if client.ask() is None:
                sys.exit(f"the server does not answer under {policy}")
            with client:
                report = flood(server.url, args, extra)
    waits = np.array(client.waits) * 1000
    flood_tokens = report["total_input_tokens"] + report["total_output_tokens"]
    return {
        "small_requests": len(waits),
        "small_failures": client.failures,
        "small_ttft_ms": {f"p{p}": round(float(np.percentile(waits, p)), 2) for p in (50, 99)} if len(waits) else None,
        "flood_completed": report["completed"],
        "flood_failed": report["failed"],
        "flood_ttft_ms": {"p50": report["p50_ttft_ms"], "p99": report["p99_ttft_ms"]},
        "flood_tokens_per_s": round(flood_tokens / report["duration"], 1),
        "tokens_per_s": round((flood_tokens + client.num_tokens) / report["duration"], 1),
    }


def main() -> None:
    """Measure the policies in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200, help="of the flood")
    parser.add_argument("--num-prompts", type=int, default=600, help="requests of the flood")
    parser.add_argument("--input-len", type=int, default=490, help="tokens of each of its prompts")
    parser.add_argument("--output-len", type=int, default=16, help="tokens of each of its answers")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--turns", type=int, default=1, help="runs of each policy, alternated")
    add_common_flags(parser)
    args = parse(parser)
    report = new_report()
    runs: dict[str, list[dict[str, Any]]] = {policy: [] for policy in args.policies}
    for _ in range(args.turns):
        for policy in args.policies:
            runs[policy].append(measure(policy, args))
            print(policy, json.dumps(runs[policy][-1]), file=sys.stderr, flush=True)
    publish({**report, "runs": runs}, args.output_json)


if __name__ == "__main__":
    main()
