"""Compares what a checkpoint costs here and in another commit: time to ready, memory, and the speed of one stream.

Servers of both start one after the other with the same checkpoint, in alternating turns. For each, the script measures
the seconds until it is ready, the memory of all its processes then and the peak during its start, the milliseconds per
token of one stream, and its tokens. Without ``--model`` the checkpoint is a Qwen2 of 0.5 B with random bfloat16 weights
in a temporary folder.

    python benches/python/load_cost.py --server "OTHER/.venv/bin/python -m rustvllm.cli.main serve" --turns 2
"""

import argparse
import http.client
import json
import os
import statistics
import tempfile
import threading
import time
import urllib.parse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_report import add_common_flags, add_server_flag, new_report, parse, publish
from measured_server import SERVE, MeasuredServer, rustvllm_server

QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
"""The shape of Qwen2.5-0.5B."""
PROMPT_TOKENS = 128
WAIT_SECONDS = 0.02


def write_checkpoint(folder: Path) -> Path:
    """Write seeded random bfloat16 weights of that shape."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config.from_dict(QWEN2)).bfloat16()
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(QWEN2))
    return folder


def megabytes(server: MeasuredServer) -> int:
    """The memory of all its processes, in MB."""
    return round(sum(server.resident_bytes().values()) / 1e6)


def prompt_of(model: Path) -> list[int]:
    """Ids from the whole vocabulary, as many as leave half of a short context free."""
    config = json.loads((model / "config.json").read_text())
    positions = config.get("max_position_embeddings") or config["n_positions"]
    return [(7919 * place + 5) % config["vocab_size"] for place in range(min(PROMPT_TOKENS, positions // 2))]


def stream(url: str, prompt: list[int], max_tokens: int) -> tuple[float, float, list[int]]:
    """One greedy stream: seconds to its first token, seconds from there to its last, and its token ids."""
    parts = urllib.parse.urlsplit(url)
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "return_token_ids": True,
        "stream": True,
    }
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=600)
    begin = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    arrivals: list[float] = []
    ids: list[int] = []
    for line in connection.getresponse():
        now = time.perf_counter()
        if line.startswith(b"data: {") and (new := json.loads(line[6:])["choices"][0].get("token_ids")):
            arrivals.append(now)
            ids += new
    connection.close()
    return arrivals[0] - begin, arrivals[-1] - arrivals[0], ids


def measure(
    command: Sequence[str], flags: Sequence[str], mode: str, prompt: list[int], num_tokens: int
) -> tuple[dict[str, float], tuple[int, ...]]:
    """Measure one server: its figures and its tokens."""
    server = rustvllm_server(flags, mode, command=command)
    most, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(WAIT_SECONDS):
            if hasattr(server, "process"):
                most[0] = max(most[0], megabytes(server))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        with server:
            done.set()
            ready = megabytes(server)
            stream(server.url, prompt, 2)
            first, rest, ids = stream(server.url, prompt, num_tokens)
            served = megabytes(server)
    finally:
        done.set()
        watching.join()
    return {
        "ready_seconds": round(server.ready_after, 2),
        "most_mb_while_starting": most[0],
        "ready_mb": ready,
        "served_mb": served,
        "ms_per_token": round(rest / (num_tokens - 1) * 1000, 2),
        "prompt_and_first_token_ms": round(first * 1000, 1),
    }, tuple(ids)


def main() -> None:
    """Start both servers in alternating turns, print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="a checkpoint's folder (default: one of 0.5 B is made)")
    parser.add_argument("--turns", type=int, default=2, help="starts of each")
    parser.add_argument("--num-tokens", type=int, default=65, help="of the stream")
    add_common_flags(parser)
    add_server_flag(parser)
    args = parse(parser)
    commands = {"own": SERVE} | ({"other": args.server} if args.server else {})
    runs: dict[str, list[dict[str, float]]] = defaultdict(list)
    drawn: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or write_checkpoint(Path(folder))
        size = sum(os.path.getsize(file) for file in model.glob("*.safetensors"))  # noqa: PTH202 -- follows links
        flags = [str(model), "--kv-cache-memory-bytes", str(256 << 20), *args.serve]
        if args.model is None:
            flags += ["--skip-tokenizer-init"]
        for turn in range(args.turns):
            for name in list(commands)[:: 1 if turn % 2 else -1]:
                figures, ids = measure(commands[name], flags, args.mode, prompt_of(model), args.num_tokens)
                runs[name].append(figures)
                drawn[name].add(ids)
    medians = {
        name: {key: statistics.median(run[key] for run in rows) for key in rows[0]} for name, rows in runs.items()
    }
    same = len(set.union(*drawn.values())) == 1
    report: dict[str, Any] = {"checkpoint_mb": round(size / 1e6), "medians": medians, "all_drew_the_same": same}
    publish({**new_report(), **report, "runs": runs}, args.output_json)


if __name__ == "__main__":
    main()
