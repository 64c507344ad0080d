"""Measures how long a step takes from the engine to a rank in another process, over the step channel.

    python benches/python/step_channel.py [--rows 256] [--num-steps 2000] [--pause-us 20 300 3000] [--cpus 0 1] [--tcp]

A scheduler plans steps of N decoding requests and publishes each (``publish_step``) while another process waits for it,
as a worker rank does. Latency is the time from before the call until the other process has the step's arrays in its own
memory, by a clock that both share. ``--pause-us`` is the time between two steps: for 50 us the reader polls for the
next one, then it sleeps and has to be woken. ``--cpus`` pins the two to different processors; otherwise a kernel may
wake the reader where the writer runs, which then waits for it. With ``--tcp`` the other process is its own node: the
frame goes over a loopback connection into a channel there, and the rank's answers come back. Prints JSON.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

import numpy as np

from rustvllm import _core

STEP, SHUTDOWN = 5, 9
SECONDS = 10.0
SECRET = b"for a benchmark alone"


def make_scheduler(rows: int) -> tuple[Any, list[dict[str, Any]], list[dict[str, Any]]]:
    """A scheduler with ``rows`` decoding requests, its buffer sets, and the same number of sets for a reader."""
    config = _core.SchedulerConfig(
        num_blocks=rows * 300 + 1, max_model_len=4096, block_size=16, max_num_seqs=rows, max_num_batched_tokens=8192
    )
    spec = _core.step_buffer_spec(config)
    both = [
        [{name: np.zeros(shape, dtype) for name, dtype, shape in spec} for _ in range(config.num_buffer_sets)]
        for _ in range(2)
    ]
    return _core.Scheduler(config, both[0]), both[0], both[1]


def follow(rows: int, fd: int, port: int | None) -> None:
    """Read steps, and print when each had arrived (ns)."""
    _, _, sets = make_scheduler(rows)
    if port is not None:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            link = _core.NodeLink.prove(connection.fileno(), SECRET, SECONDS)
        fd = link.follow(1)
    reader = _core.StepReader(fd, 1)
    reader.register(sets)
    arrived = []
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        command = reader.wait(SECONDS)
        if command != STEP:
            break
        reader.step()
        arrived.append(time.monotonic_ns())
        reader.finish()
    sys.stdout.write(json.dumps(arrived) + "\n")


def measure(rows: int, num_steps: int, pause_us: float, cpus: list[int] | None, *, tcp: bool) -> dict[str, Any]:
    """Measure latencies in microseconds."""
    scheduler, sets, _ = make_scheduler(rows)
    writer = _core.StepWriter(1)
    writer.register(sets)
    command = [sys.executable, __file__, "--rows", str(rows), "--follow", str(writer.fileno())]
    command += [] if cpus is None else ["--cpus", *map(str, cpus)]
    listener = socket.create_server(("127.0.0.1", 0)) if tcp else None
    if listener is not None:
        command += ["--port", str(listener.getsockname()[1])]
    with subprocess.Popen(command, pass_fds=(writer.fileno(),), stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        if listener is not None:
            connection, _ = listener.accept()
            link = _core.NodeLink.welcome(connection.fileno(), SECRET, SECONDS)
            link.lead(writer, 1, 1)
        child.stdout.readline()
        for index in range(rows):
            scheduler.add_request(str(index), [1 + index % 7] * 16, max_tokens=4000)
        sent: list[int] = []
        calls: list[int] = []
        sampled = np.full((rows, 1), 5, np.int32)
        warm = num_steps // 10
        while len(sent) < num_steps + warm:
            output = scheduler.schedule()
            assert output is not None
            end = time.monotonic_ns() + int(pause_us * 1000)
            while time.monotonic_ns() < end:
                pass
            began = time.monotonic_ns()
            writer.publish_step(STEP, output, 0, SECONDS)
            calls.append(time.monotonic_ns() - began)
            sent.append(began)
            scheduler.update_from_output(output, sampled[: output.num_sampled])
            scheduler.take_outputs()
        writer.publish(SHUTDOWN, [], SECONDS)
        arrived = json.loads(child.stdout.readline())
    latencies = (np.asarray(arrived) - np.asarray(sent))[warm:] / 1e3
    took = np.asarray(calls)[warm:] / 1e3
    return {
        "over": "tcp" if tcp else "memory",
        "rows": rows,
        "steps": num_steps,
        "pause_us": pause_us,
        "latency_us": {f"p{q}": round(float(np.percentile(latencies, q)), 2) for q in (10, 50, 90, 99)},
        "publish_us": {f"p{q}": round(float(np.percentile(took, q)), 2) for q in (10, 50, 90, 99)},
        "waited_for_slots_s": round(writer.blocked_seconds, 4),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    """Measure, or run as the reader."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--num-steps", type=int, default=2000)
    parser.add_argument("--pause-us", type=float, nargs="+", default=[20.0, 300.0, 3000.0])
    parser.add_argument("--cpus", type=int, nargs=2, help="one processor for each of the two processes")
    parser.add_argument("--tcp", action="store_true", help="the other process is another node")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--follow", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cpus is not None:
        os.sched_setaffinity(0, {args.cpus[0 if args.follow is None else 1]})
    if args.follow is not None:
        follow(args.rows, args.follow, args.port)
        return
    found = [measure(args.rows, args.num_steps, pause, args.cpus, tcp=args.tcp) for pause in args.pause_us]
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
