"""Measures costs and gains of stages: tokens per second of a model in one process, in two ranks, and in two stages.

    python benches/python/pipeline_parallel.py [--rows 1 2 8 32] [--tokens 48] [--turns 3]

The model is a GPT-2 with 85 M parameters besides its vocabulary, in float32 with random weights and the embedded
model's tokenizer. Each way to run it is an engine in its own process, with two threads in total; they alternate. A
number of greedy requests of 16 tokens each get ``--tokens`` more. The script prints JSON: for each way and number of
requests, the median of output tokens per second, the number of steps, and the share of rank 0's time that it waited for
others.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from typing import Any

SHAPE = {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_inner": 3072}
WAYS = {"1 process": (1, 1), "2 ranks": (2, 1), "2 stages": (1, 2)}
"""The tensor_parallel_size and pipeline_parallel_size of each way."""


def measure(tensor_size: int, stages: int, rows: list[int], num_tokens: int) -> dict[int, dict[str, float]]:
    """Run the model in one way, in this process."""
    from rustvllm import LLM, SamplingParams

    llm = LLM(
        hf_overrides=SHAPE,
        load_format="dummy",
        device="cpu",
        max_num_seqs=max(rows),
        max_model_len=256,
        enable_prefix_caching=False,
        tensor_parallel_size=tensor_size,
        pipeline_parallel_size=stages,
    )
    core = llm.llm_engine.engine_core.core
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    found = {}
    for count in [rows[0], *rows]:  # the first run warms up
        prompts = [{"prompt_token_ids": [3 + (7 * i + 11 * j) % 200 for j in range(16)]} for i in range(count)]
        steps, states = core.scheduler.stats()["num_steps"], core.executor.rank_states()
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        after = core.executor.rank_states()
        waited = after[0]["collective_seconds"] - states[0]["collective_seconds"] if states else 0.0
        found[count] = {
            "tokens_per_s": sum(len(each.outputs[0].token_ids) for each in outputs) / seconds,
            "steps": core.scheduler.stats()["num_steps"] - steps,
            "waited": waited / seconds,
        }
    llm.shutdown()
    return found


def main() -> int:
    """Run all ways in alternating turns, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 8, 32])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way is not None:
        print(json.dumps(measure(*WAYS[args.way], args.rows, args.tokens)))
        return 0
    taken: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(args.turns):
        for way, (tensor_size, stages) in WAYS.items():
            threads = 2 // (tensor_size * stages)
            command = [sys.executable, __file__, "--way", way, "--tokens", str(args.tokens), "--rows"]
            answer = subprocess.run(
                [*command, *map(str, args.rows)],
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
                stdout=subprocess.PIPE,
                check=True,
                text=True,
            )
            taken[way].append(json.loads(answer.stdout.splitlines()[-1]))
    report = {
        way: {
            count: {name: round(statistics.median(turn[count][name] for turn in turns), 3) for name in turns[0][count]}
            for count in map(str, args.rows)
        }
        for way, turns in taken.items()
    }
    print(json.dumps({"load": os.getloadavg(), "python": platform.python_version(), "ways": report}, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
