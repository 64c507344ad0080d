"""Sends hostile schemas while other streams run, and measures the answers and the effect on the streams.

    python benches/python/hostile_schemas.py --seed 1 --cases 500

The embedded model serves ``--streams`` streams all the time; ``--clients`` clients send one case after another (see
``schema_bombs.py``). The report has the answers by status, those that took longer than ``--limit`` seconds, failures (a
status of 500 or more, no answer, a legal schema that is refused), the streams' gaps before and during the cases, and
the memory of all processes before, after, and at most. The exit code is 1 if something failed.
"""

import argparse
import http.client
import sys
import threading
import time
import urllib.parse
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from bench_report import add_common_flags, new_report, parse, publish
from measured_server import MeasuredServer, rustvllm_server
from neighbours import Neighbours
from schema_bombs import Bomb, bombs

TIMEOUT_SECONDS = 60
MEBI = 1 << 20
SETTLE_SECONDS = 5.0
NUM_BLOCKS = 1536
"""Blocks of the KV cache: enough for the streams, but so few that all have been written before memory is measured. The
system provides memory when it is first written: in a larger cache, the streams alone take megabytes each second."""
FILL_SECONDS = 20.0


def send(url: str, bomb: Bomb) -> tuple[int, float, str]:
    """Status (0 without an answer), seconds, and the beginning of the answer."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_SECONDS)
    begin = time.perf_counter()
    try:
        connection.request("POST", "/v1/completions", bomb.body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        status, said = answer.status, answer.read()[:300].decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        status, said = 0, repr(error)
    finally:
        connection.close()
    return status, time.perf_counter() - begin, said


class MemoryWatch:
    """Measures the peak memory of all processes of a server within its context, in MiB."""

    def __init__(self, server: MeasuredServer) -> None:
        self._server, self._done, self.most = server, threading.Event(), 0.0
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.05):
            self.most = max(self.most, memory(self._server))


def memory(server: MeasuredServer) -> float:
    """Memory of all its processes, in MiB."""
    return sum(server.resident_bytes().values()) / MEBI


def run(server: MeasuredServer, args: argparse.Namespace) -> dict[str, Any]:
    """Send all cases; returns what became of them and of the other streams."""
    warm = list(bombs(args.seed, 3))
    for bomb in warm:
        send(server.url, bomb)  # makes the engine read the vocabulary
    with Neighbours(server.url, args.streams) as others:
        time.sleep(FILL_SECONDS)
        others.take()
        time.sleep(SETTLE_SECONDS)
        before, memory_before = others.take(), memory(server)
        cases = list(bombs(args.seed, args.cases))
        with MemoryWatch(server) as watch, ThreadPoolExecutor(args.clients) as pool:
            outcomes = list(pool.map(lambda bomb: send(server.url, bomb), cases))
        during = others.take()
        time.sleep(SETTLE_SECONDS)
        after, memory_after = others.take(), memory(server)
    statuses: dict[str, Counter[str]] = {}
    slow, failures = [], []
    for index, (bomb, (status, seconds, said)) in enumerate(zip(cases, outcomes, strict=True)):
        statuses.setdefault(bomb.kind, Counter())[str(status)] += 1
        row = {"case": index, "kind": bomb.kind, "status": status, "seconds": round(seconds, 2), "says": said}
        if seconds > args.limit:
            slow.append(row)
        if status == 0 or status >= 500 or (bomb.is_legal and status != 200):
            failures.append(row)
    longest = max(seconds for _, seconds, _ in outcomes)
    return {
        "statuses": statuses,
        "longest_seconds": round(longest, 2),
        "slow": slow,
        "failures": failures,
        "before": before,
        "during": during,
        "after": after,
        "memory_mib": {
            "before": round(memory_before),
            "most": round(watch.most),
            "after": round(memory_after),
        },
    }


def main() -> int:
    """Start the server, send the cases, publish the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of the cases")
    parser.add_argument("--cases", type=int, default=500, help="how many")
    parser.add_argument("--clients", type=int, default=2, help="that send at a time")
    parser.add_argument("--streams", type=int, default=32, help="of others")
    parser.add_argument("--limit", type=float, default=2.5, help="seconds in which each should be answered")
    add_common_flags(parser)
    args = parse(parser)
    print(f"seed {args.seed}", file=sys.stderr)
    flags = ["--max-num-seqs", "64", "--num-gpu-blocks-override", str(NUM_BLOCKS), *args.serve]
    with rustvllm_server(flags, args.mode) as server:
        report = run(server, args)
    publish({**new_report(), "seed": args.seed, "cases": args.cases, **report}, args.output_json)
    return 1 if report["failures"] or report["slow"] else 0


if __name__ == "__main__":
    sys.exit(main())
