"""Runs one model on two nodes: two network namespaces, and a network between them that delays every packet.

    python benches/python/two_nodes.py [--model MODEL] [--delay-ms 0.5] [--threads 1] [--shapes tp pp]

Each node is its own namespace with one tun device (root, or ``unshare -rn``). A thread carries packets from one to the
other and keeps each for the delay, so a round trip takes at least twice as long. The head generates with two ranks on
two nodes (gloo), and again without the second node. The script prints the round trip, whether the tokens are equal,
times, and what happens when the network is cut, as JSON. The exit code is 1 if a token differs.
"""

import argparse
import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import platform
import re
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEAD, NODE = "10.213.0.1", "10.213.0.2"
PORT = 29501
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
SECRET = "0123456789abcdef-between-two"  # noqa: S105 -- opens nothing
ENDLESS = """
import json, sys, time
from rustvllm import LLM, SamplingParams
llm = LLM(**json.loads(sys.stdin.readline())["engine"])
params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
try:
    while True:
        llm.generate([{"prompt_token_ids": [5, 6, 7]}] * 4, params, use_tqdm=False)
        print("works", flush=True)
except Exception as error:
    print("ended", error, flush=True)
"""
SCRIPT = """
import json, sys, time
from rustvllm import LLM, SamplingParams
order = json.loads(sys.stdin.readline())
llm = LLM(**order["engine"])
params = [SamplingParams(temperature=0, max_tokens=order["tokens"], ignore_eos=True)] * order["requests"]
prompts = [{"prompt_token_ids": [3 + (7 * i + 11 * j) % 200 for j in range(5 + 3 * i)]} for i in range(len(params))]
llm.generate(prompts[:1], params[:1], use_tqdm=False)
began = time.perf_counter()
outputs = llm.generate(prompts, params, use_tqdm=False)
seconds = time.perf_counter() - began
views = getattr(llm.llm_engine.engine_core.core.executor, "rank_states", list)()
print("found", json.dumps({"ids": [list(o.outputs[0].token_ids) for o in outputs], "seconds": seconds, "ranks": views}))
"""


@contextlib.contextmanager
def namespace(name: str, address: str) -> Iterator[int]:
    """Make a network namespace with one tun device; yields the device's descriptor."""
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        with open("/proc/self/ns/net", "rb") as own, open(f"/run/netns/{name}", "rb") as other:  # noqa: PTH123 -- setns
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(other.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
            tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)  # it belongs to the namespace of this thread
            fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22s", b"tun0", IFF_TUN | IFF_NO_PI, b""))
            libc.setns(own.fileno(), CLONE_NEWNET)
        for command in (
            ["addr", "add", f"{address}/24", "dev", "tun0"], ["link", "set", "tun0", "up"], ["link", "set", "lo", "up"],
        ):  # fmt: skip
            subprocess.run(["ip", "-n", name, *command], check=True)
        yield tun
        os.close(tun)
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


def carry(first: int, second: int, delay: float, is_cut: threading.Event) -> None:
    """Carry packets from each device to the other, each after the delay, or drop them after the cut."""
    waiting: list[tuple[float, int, int, bytes]] = []
    count, to = 0, {first: second, second: first}
    while True:  # until the program ends
        limit = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for fd in select.select([first, second], [], [], limit)[0]:
            with contextlib.suppress(BlockingIOError):
                while packet := os.read(fd, 65535):
                    count += 1
                    heapq.heappush(waiting, (time.monotonic() + delay, count, to[fd], packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, fd, packet = heapq.heappop(waiting)
            if is_cut.is_set():
                continue
            with contextlib.suppress(OSError):  # the other side's queue is full, which happens in real networks, too
                os.write(fd, packet)


def round_trip(prefix: list[str]) -> float:
    """The median of twenty round trips in milliseconds: how long a closed port takes to refuse a connection."""
    code = (
        "import socket, time, statistics as s\nfound = []\nfor _ in range(20):\n began = time.perf_counter()\n"
        f" socket.socket().connect_ex(({NODE!r}, 9))\n found.append(time.perf_counter() - began)\n"
        "print(s.median(found) * 1e3)"
    )
    done = subprocess.run([*prefix, sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    return round(float(done.stdout), 3)


def generate(prefix: list[str], order: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    """Run the generating script, and return what it found."""
    command = [*prefix, sys.executable, "-c", SCRIPT]
    done = subprocess.run(
        command,
        input=json.dumps(order) + "\n",
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=250,
    )
    found = re.search(r"^found (.*)$", done.stdout, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{done.stdout}\n{done.stderr}"[-2000:])
    return dict(json.loads(found[1]))


def main() -> int:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the model of the package, in a shape that two ranks can hold")
    parser.add_argument("--delay-ms", type=float, default=0.5, help="of each packet, in each direction")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--shapes", nargs="+", choices=["tp", "pp"], default=["tp", "pp"])
    args = parser.parse_args()
    engine: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "max_num_seqs": 8, "num_gpu_blocks_override": 200}
    engine |= {"hf_overrides": {"n_head": 4}} if args.model is None else {"model": args.model}
    environment = {**os.environ, "RUSTVLLM_ENGINE_SECRET": SECRET, "OMP_NUM_THREADS": str(args.threads)}
    order = {"engine": engine, "tokens": args.tokens, "requests": args.requests}
    alone = generate([], order, environment)
    report: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(), "cpus": os.cpu_count(), "delay_ms": args.delay_ms,
        "one_process_s": round(alone["seconds"], 3), "steps": args.tokens,
    }  # fmt: skip
    names = [f"rustvllm-{os.getpid()}-{index}" for index in range(2)]
    with namespace(names[0], HEAD) as first, namespace(names[1], NODE) as second:
        is_cut = threading.Event()
        arguments = (first, second, args.delay_ms / 1e3, is_cut)
        threading.Thread(target=carry, args=arguments, daemon=True).start()
        report["round_trip_ms"] = round_trip(["ip", "netns", "exec", names[0]])
        for shape in args.shapes:
            report[shape] = run_shape(shape, names, order, environment, alone)
        report["network_cut"] = run_cut(names, order, environment, is_cut)
    print(json.dumps(report, indent=2))
    return 0 if all(report[shape]["equal"] for shape in args.shapes) else 1


def sizes(shape: str) -> dict[str, Any]:
    """Additional options of the head."""
    kind = "tensor" if shape == "tp" else "pipeline"
    return {f"{kind}_parallel_size": 2, "nnodes": 2, "master_addr": HEAD, "master_port": PORT}


@contextlib.contextmanager
def node_of(
    shape: str, names: list[str], order: dict[str, Any], environment: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the other node, which writes to a temporary file."""
    command = ["ip", "netns", "exec", names[1], sys.executable, "-m", "rustvllm.cli.main", "serve", "--headless"]
    command += [f"-{shape}", "2", "-n", "2", "-r", "1", "--master-addr", HEAD, "--master-port", str(PORT)]
    engine = order["engine"]
    command += ["--device", "cpu"]
    command += (
        ["--model", engine["model"]] if "model" in engine else ["--hf-overrides", json.dumps(engine["hf_overrides"])]
    )
    log = Path(f"/tmp/{names[1]}.log")  # noqa: S108 -- removed below
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output, env=environment) as node:
        yield node
        node.kill()
    log.unlink()


def run_cut(
    names: list[str], order: dict[str, Any], environment: dict[str, str], is_cut: threading.Event
) -> dict[str, Any]:
    """Cut the network in the middle of steps, and return what the head and the node do."""
    command = ["ip", "netns", "exec", names[0], sys.executable, "-c", ENDLESS]
    with (
        node_of("tp", names, order, environment) as node,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            stderr=subprocess.DEVNULL,
        ) as head,
    ):
        assert head.stdin is not None
        assert head.stdout is not None
        head.stdin.write(json.dumps({**order, "engine": {**order["engine"], **sizes("tp")}}) + "\n")
        head.stdin.flush()
        assert head.stdout.readline() == "works\n"
        is_cut.set()
        began = time.monotonic()
        words = head.stdout.readline()
        while words == "works\n":
            words = head.stdout.readline()
        known = time.monotonic() - began
        code = node.wait(60)
        gone = time.monotonic() - began
        is_cut.clear()
    return {"known_s": round(known, 2), "node_gone_s": round(gone, 2), "node_exit_code": code, "words": words.strip()}


def run_shape(
    shape: str, names: list[str], order: dict[str, Any], environment: dict[str, str], alone: dict[str, Any]
) -> dict[str, Any]:
    """Run two ranks on two nodes, by tensor parallelism or in stages."""
    with node_of(shape, names, order, environment) as node:
        engine = {**order["engine"], **sizes(shape)}
        found = generate(["ip", "netns", "exec", names[0]], {**order, "engine": engine}, environment)
        code = node.wait(30)
    return {
        "equal": found["ids"] == alone["ids"],
        "seconds": round(found["seconds"], 3),
        "of_one_process": round(alone["seconds"] / found["seconds"], 3),
        "collectives": [state["collectives"] for state in found["ranks"]],
        "collective_s": [round(state["collective_seconds"], 3) for state in found["ranks"]],
        "nodes": [state["node_rank"] for state in found["ranks"]],
        "node_exit_code": code,
    }


if __name__ == "__main__":
    sys.exit(main())
