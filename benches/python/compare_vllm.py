"""Compares rustvllm with vLLM: the same tiny model, the same client, the same cores, in alternating turns.

Both serve one checkpoint of one layer, so the comparison measures the host: scheduler, sampling, text, HTTP. Each turn
measures one server, while the other is stopped (SIGSTOP) or idle. docs/benchmarks/engines.md says how to install vLLM.

    python benches/python/compare_vllm.py --vllm-python vllm/bin/python --output-json report.json
"""

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench_report import add_common_flags, new_report, parse, publish, whole_numbers
from measured_server import MeasuredServer, bench_serve, rustvllm_server
from tiny_checkpoint import write_tiny_llama
from tokenizer_folder import tokenizer_folder

TOKENIZER = tokenizer_folder("slm4096-gpt2/hf")
INPUT_LEN, OUTPUT_LEN = 32, 64
COLUMNS = {
    "output_throughput": "tokens/s",
    "tokens_per_event": "tokens per event",
    "p50_ttft_ms": "TTFT p50",
    "p99_ttft_ms": "TTFT p99",
    "p50_itl_ms": "ITL p50",
    "p99_itl_ms": "ITL p99",
    "server_cpu_us_per_token": "server, us per token",
    "server_cores": "server, cores",
    "client_load": "client, cores",
}


def vllm_server(python: Path, model: Path, args: argparse.Namespace) -> MeasuredServer:
    """The server of vLLM, started as its documentation says for a CPU, without a log line per request."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    library = python.parent.parent / "lib/libiomp5.so"
    cores = sorted(os.sched_getaffinity(0))
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": args.vllm_cores or ",".join(map(str, cores)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": "",  # keeps our modules out of its processes
        **({"LD_PRELOAD": str(library)} if library.exists() else {}),
    }
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += [
        "--host",
        "127.0.0.1",
        "--disable-uvicorn-access-log",
        *common_flags(args),
        *args.vllm_arguments.split(),
    ]
    log = Path(args.log_folder) / "vllm.log" if args.log_folder else None
    url = f"http://127.0.0.1:{port}"
    return MeasuredServer(command, url=url, environment=environment, ready_seconds=600, log=log)


def our_server(model: Path, args: argparse.Namespace) -> MeasuredServer:
    """The server of rustvllm."""
    log = Path(args.log_folder) / "rustvllm.log" if args.log_folder else None
    flags = ["--model", str(model), "--device", "cpu", "--kv-cache-memory-bytes", str(1 << 30)]
    return rustvllm_server([*flags, *common_flags(args), *args.arguments.split()], args.mode, log)


def common_flags(args: argparse.Namespace) -> list[str]:
    """Flags for both servers."""
    caching = "--enable-prefix-caching" if args.prefix_caching else "--no-enable-prefix-caching"
    flags = ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "256", caching]
    return [*flags, "--max-num-batched-tokens", "2048"]


def load(server: MeasuredServer, concurrency: int, num_prompts: int, vocab_size: int, seed: int) -> dict[str, Any]:
    """One measurement: the client's report and the server's processor time."""
    flags = ["--random-input-len", str(INPUT_LEN), "--random-output-len", str(OUTPUT_LEN)]
    flags += ["--vocab-size", str(vocab_size), "--seed", str(seed)]
    before = server.processor_seconds()
    report = bench_serve(server.url, concurrency, num_prompts, *flags)
    used = server.processor_seconds()
    used.subtract(before)
    tokens = report["total_output_tokens"]
    by_thread = {name: 1e6 * seconds / tokens for name, seconds in used.most_common() if seconds > 0}
    return {
        **{key: report[key] for key in COLUMNS if key in report},
        "p50_e2el_ms": report["p50_e2el_ms"],
        "completed": report["completed"],
        "failed": report["failed"],
        "errors_by_kind": report["errors_by_kind"],
        "total_output_tokens": tokens,
        "output_tokens_from": report["output_tokens_from"],
        "duration": report["duration"],
        "server_cpu_us_per_token": sum(by_thread.values()),
        "server_cpu_us_per_token_by_thread": by_thread,
        "server_cores": sum(by_thread.values()) * tokens / 1e6 / report["duration"],
    }


def compare(
    servers: Mapping[str, MeasuredServer], concurrency: int, vocab_size: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Alternate runs of all servers at one concurrency."""
    num_prompts: dict[str, int] = {}
    for name, server in servers.items():
        with awake(servers, name):
            # The first run warms up; the second determines how many requests fill a run.
            load(server, concurrency, 2 * concurrency, vocab_size, seed=98)
            speed = load(server, concurrency, 6 * concurrency, vocab_size, seed=99)["output_throughput"]
        num_prompts[name] = max(4 * concurrency, round(speed * args.seconds / OUTPUT_LEN))
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
    for turn in range(args.turns):
        for name, server in servers.items():
            with awake(servers, name):
                load_before = os.getloadavg()[0]
                run = load(server, concurrency, num_prompts[name], vocab_size, seed=turn)
            runs[name].append({**run, "load_average_before": load_before})
            print(row(name, concurrency, run), file=sys.stderr, flush=True)
    medians = {
        name: {key: statistics.median(run[key] for run in of_one) for key in COLUMNS} for name, of_one in runs.items()
    }
    return {
        "concurrency": concurrency,
        "runs": runs,
        "medians": medians,
        "ratios": ratios(runs) if len(runs) == 2 else None,
        "tokens_per_event_no_more": None
        if len(runs) < 2
        else medians["rustvllm"]["tokens_per_event"] <= medians["vllm"]["tokens_per_event"],
    }


def ratios(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """Our value over the other server's, turn by turn: median, smallest, largest."""
    found = {}
    for key in COLUMNS:
        of_turns = [ours[key] / theirs[key] for ours, theirs in zip(runs["rustvllm"], runs["vllm"], strict=True)]
        found[key] = {"median": statistics.median(of_turns), "min": min(of_turns), "max": max(of_turns)}
    return found


def awake(servers: Mapping[str, MeasuredServer], name: str) -> ExitStack:
    """Within the context, vLLM is stopped if the other server is measured."""
    stack = ExitStack()
    for other, server in servers.items():
        if other == "vllm" and other != name:
            server.pause()
            stack.callback(server.resume)
    return stack


def idle_cores(servers: Mapping[str, MeasuredServer], seconds: float = 5) -> dict[str, float]:
    """The processor time of each server without requests, in cores."""
    before = {name: server.processor_seconds().total() for name, server in servers.items()}
    time.sleep(seconds)
    return {name: (server.processor_seconds().total() - before[name]) / seconds for name, server in servers.items()}


def row(name: str, concurrency: int, run: Mapping[str, Any]) -> str:
    """One run as text."""
    values = "  ".join(
        f"{label} {run[key]:.{0 if key == 'output_throughput' else 2}f}" for key, label in COLUMNS.items()
    )
    return f"{name:<8} {concurrency:>3}: {values}"


def main() -> None:
    """Start both servers, measure in alternating turns, print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--vllm-python", type=Path, help="interpreter of the environment vLLM is in; none: rustvllm alone"
    )
    parser.add_argument("--concurrency", type=whole_numbers, default=[16, 64, 256])
    parser.add_argument("--turns", type=int, default=3, help="measurements of each server (default: 3)")
    parser.add_argument("--seconds", type=float, default=8, help="of one measurement, about (default: 8)")
    parser.add_argument("--num-layers", type=int, default=1)
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER, help="a folder with a tokenizer.json")
    parser.add_argument("--prefix-caching", action="store_true", help="on in both; off in both by default")
    parser.add_argument("--arguments", default="", help="more flags of rustvllm serve, in one string")
    parser.add_argument("--vllm-arguments", default="", help="more flags of vLLM's server, in one string")
    parser.add_argument("--vllm-cores", default="", help="VLLM_CPU_OMP_THREADS_BIND (default: every core)")
    parser.add_argument("--log-folder", help="what the servers print goes there; made if it is not there")
    add_common_flags(parser)
    args = parse(parser)
    if args.log_folder:
        Path(args.log_folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = write_tiny_llama(Path(folder) / "tiny-llama", args.tokenizer, num_layers=args.num_layers)
        vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
        servers: dict[str, MeasuredServer] = {}
        if args.vllm_python:
            servers["vllm"] = stack.enter_context(vllm_server(args.vllm_python.absolute(), model, args))
        servers["rustvllm"] = stack.enter_context(our_server(model, args))
        report: dict[str, Any] = {
            **new_report(),
            "servers": {name: " ".join(server.command) for name, server in servers.items()},
            "ready_after_s": {name: server.ready_after for name, server in servers.items()},
            "server_versions": {name: server.get("/version")["version"] for name, server in servers.items()},
            "idle_cores": idle_cores(servers),
            "model": {"num_layers": args.num_layers, "hidden_size": 64, "vocab_size": vocab_size},
            "input_len": INPUT_LEN,
            "output_len": OUTPUT_LEN,
            "prefix_caching": args.prefix_caching,
            "results": [],
        }
        for concurrency in args.concurrency:
            report["results"].append(compare(servers, concurrency, vocab_size, args))
            if args.output_json:  # keeps the results so far if something ends the rest
                args.output_json.write_text(json.dumps(report, indent=2) + "\n")
    publish(report, args.output_json)
    print(table(report), file=sys.stderr)


def table(report: Mapping[str, Any]) -> str:
    """Medians and ratios as a table for a document."""
    lines = ["| | concurrency | " + " | ".join(COLUMNS.values()) + " |", "|---|---:|" + "---:|" * len(COLUMNS)]
    for result in report["results"]:
        kinds = dict(result["medians"])
        if result["ratios"]:
            kinds["ratio"] = {key: ratio["median"] for key, ratio in result["ratios"].items()}
        for name, values in kinds.items():
            cells = " | ".join(f"{values[key]:.2f}" if values[key] < 1000 else f"{values[key]:.0f}" for key in COLUMNS)
            lines.append(f"| {name} | {result['concurrency']} | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
