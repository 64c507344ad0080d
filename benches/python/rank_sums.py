"""Measures a sum over ranks on the CPU, through shared memory and by gloo, in alternating turns.

    python benches/python/rank_sums.py [--ranks 2] [--numbers 768 6144 98304 393216] [--num-sums 200] [--turns 5]
        [--spin-us 200] [--no-pins] [--output-json FILE]

Each rank is a process of one thread, on its own processor unless ``--no-pins`` is given. A sum has the given count of
float32 numbers, as after half of a block: 768 are one row of a model that is 768 wide. Times are microseconds as the
first rank sees them; the ranks meet before each sum, so they include no wait for a late rank. Other work on the machine
disturbs the 10th percentile least.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench_report import new_report, publish

KINDS = ("shared", "gloo")


def sum_as_rank(order: dict[str, Any]) -> None:
    """Compute sums in alternating ways, each the given number of times; the first rank prints the times (s)."""
    if order["pins"]:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[order["rank"] % len(cores)]})
    import torch

    from rustvllm import _core
    from rustvllm.distributed import rendezvous
    from rustvllm.distributed.rank_group import RankGroup

    torch.set_num_threads(1)
    rank, size = order["rank"], order["size"]
    store = torch.distributed.TCPStore("127.0.0.1", order["port"], size, is_master=rank == 0)
    meeting = _core.RankMeeting.join(order["meeting_fd"], rank, spin_us=order["spin_us"])
    gloo = rendezvous.make_group(store, rank, size, torch.device("cpu"), 60.0)
    groups = {"shared": RankGroup(rank, size, gloo.group, meeting=meeting), "gloo": gloo}
    barrier = torch.zeros(1)
    found: dict[str, dict[str, list[float]]] = {}
    for count in order["numbers"]:
        data = torch.zeros(count)
        seconds = found[str(count)] = {kind: [] for kind in KINDS}
        for _ in range(order["turns"]):
            for kind in KINDS:
                for index in range(order["num_sums"] + 5):
                    data.fill_(rank + 1)
                    groups["shared"].all_reduce(barrier)
                    began = time.perf_counter()
                    groups[kind].all_reduce(data)
                    if index >= 5:  # the first ones touch memory for the first time
                        seconds[kind].append(time.perf_counter() - began)
                if not bool((data == size * (size + 1) / 2).all()):
                    raise SystemExit(f"a sum of {count} numbers by {kind} is wrong")
    if rank == 0:
        sys.stdout.write(json.dumps(found) + "\n")


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Start the ranks, and return the times of each way."""
    from rustvllm import _core

    meeting = _core.RankMeeting(options.ranks)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    order = {
        "size": options.ranks, "port": port, "meeting_fd": meeting.fileno(), "spin_us": options.spin_us,
        "pins": not options.no_pins, "numbers": options.numbers, "num_sums": options.num_sums, "turns": options.turns,
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--as-rank", json.dumps(order | {"rank": rank})],
            env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, stdout=subprocess.PIPE, pass_fds=(meeting.fileno(),),
        )
        for rank in range(options.ranks)
    ]  # fmt: skip
    answers = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank failed; what it wrote is above")
    results = []
    for count, kinds in json.loads(answers[0]).items():
        result: dict[str, Any] = {"numbers": int(count)}
        for kind, seconds in kinds.items():
            tenths = statistics.quantiles(seconds, n=10)
            result[kind] = {"p10_us": round(1e6 * tenths[0], 1), "p50_us": round(1e6 * tenths[4], 1)}
        results.append(result)
    return results


def main() -> None:
    """Measure, or run as a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--numbers", type=int, nargs="+", default=[768, 6144, 98304, 393216])
    parser.add_argument("--num-sums", type=int, default=200)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--spin-us", type=int, default=200, help="how long a rank looks for another before it sleeps")
    parser.add_argument("--no-pins", action="store_true", help="let the ranks run on any processor")
    parser.add_argument("--output-json", type=Path)
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank is not None:
        sum_as_rank(json.loads(options.as_rank))
        return
    report = new_report()
    report["load"] = os.getloadavg()[0]
    report["results"] = measure(options)
    publish(report, options.output_json)


if __name__ == "__main__":
    main()
