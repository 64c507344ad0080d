"""Compares serving with the same work offline: GPT-2 small's shape, in alternating turns, on the CPU.

Offline is ``LLM.generate`` in its own process. Served is ``rustvllm serve`` with a client that streams as many answers
at once as the engine may run. Prompts have 128 tokens, answers 128 greedy tokens; while one side is measured, the other
is idle.

    python benches/python/serve_vs_offline.py [--concurrency 16] [--num-prompts 64] --output-json report.json
"""

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench_report import new_report, publish
from compare_offline import INPUT_LEN, MAX_MODEL_LEN, OUTPUT_LEN, Engine, end_on_signals, prompts_of
from measured_server import bench_serve, rustvllm_server
from tiny_checkpoint import write_gpt2_small
from tokenizer_folder import tokenizer_folder

TOKENIZER = tokenizer_folder("gpt2-tokenizer")


def main() -> None:
    """Start both, measure in alternating turns, print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="folder of the checkpoint, made if it is not there")
    parser.add_argument("--concurrency", type=int, default=16, help="streams at once, and max_num_seqs of both")
    parser.add_argument("--num-prompts", type=int, default=64, help="of one turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER, help="a folder with a tokenizer.json")
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    end_on_signals()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = args.model or Path(folder) / "gpt2-small"
        if not (model / "config.json").exists():
            write_gpt2_small(model, args.tokenizer)
        vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
        settings = {
            "model": str(model),
            "dtype": "float32",
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": args.concurrency,
        }
        offline = stack.enter_context(Engine("rustvllm", sys.executable, settings, {}, Path(folder) / "offline.log"))
        flags = ["--model", str(model), "--device", "cpu", "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN)]
        flags += ["--max-num-seqs", str(args.concurrency), "--no-enable-prefix-caching"]
        server = stack.enter_context(rustvllm_server(flags, "process"))
        lengths = ["--random-input-len", str(INPUT_LEN), "--random-output-len", str(OUTPUT_LEN)]
        runs: list[dict[str, Any]] = []
        for turn in range(-1, args.turns):  # the first warms up
            seconds = offline.generate(prompts_of(turn, args.num_prompts, vocab_size), OUTPUT_LEN)["seconds"]
            served = bench_serve(
                server.url,
                args.concurrency,
                args.num_prompts,
                *lengths,
                "--vocab-size",
                str(vocab_size),
                "--seed",
                str(turn + 100),
            )
            run = {
                "offline_tokens_per_second": args.num_prompts * OUTPUT_LEN / seconds,
                "served_tokens_per_second": served["output_throughput"],
                "p50_ttft_ms": served["p50_ttft_ms"],
                "p50_itl_ms": served["p50_itl_ms"],
                "p99_itl_ms": served["p99_itl_ms"],
                "failed": served["failed"],
            }
            run["served_over_offline"] = run["served_tokens_per_second"] / run["offline_tokens_per_second"]
            print(turn, {key: round(value, 3) for key, value in run.items()}, file=sys.stderr, flush=True)
            if turn >= 0:
                runs.append(run)
        report = {
            **new_report(),
            "model": "GPT-2 small's shape, random weights, float32",
            "concurrency": args.concurrency,
            "num_prompts": args.num_prompts,
            "runs": runs,
            "medians": {key: statistics.median(run[key] for run in runs) for key in runs[0]},
        }
    publish(report, args.output_json)


if __name__ == "__main__":
    main()
