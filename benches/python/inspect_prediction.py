"""Compares predictions of ``rustvllm inspect`` for checkpoints on the CPU with measurements: memory and time per token.

    python benches/python/inspect_prediction.py model-Q4_K_M.gguf awq-folder …

For each checkpoint the script runs ``inspect --json`` (and measures its seconds), then an ``LLM`` in its own process.
The growth of that process's anonymous pages during ``load_model`` is compared with ``weights_bytes``; the lowest time
per token of several streams of 64 tokens after a short prompt is compared with ``best_token_ms``.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench_report import new_report, publish
from measured_server import RUSTVLLM

KV_BYTES = 256 << 20
MAX_MODEL_LEN = 512
NUM_STREAMS = 5
NUM_TOKENS = 64
PROMPT = [5, 6, 7, 8]


def anonymous_bytes() -> int:
    """The anonymous memory of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1]) * 1024


def one(model: str) -> dict[str, float]:
    """Measure in this process."""
    from rustvllm import LLM, SamplingParams
    from rustvllm.worker import worker

    found: dict[str, float] = {}
    load = worker.Worker.load_model

    def measured(self: worker.Worker) -> None:
        before = anonymous_bytes()
        load(self)
        found["weights_bytes"] = anonymous_bytes() - before

    worker.Worker.load_model = measured  # type: ignore[method-assign]
    llm = LLM(
        model,
        device="cpu",
        skip_tokenizer_init=True,
        max_model_len=MAX_MODEL_LEN,
        kv_cache_memory_bytes=KV_BYTES,
        enable_prefix_caching=False,
    )

    def seconds(num_tokens: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
        return time.perf_counter() - begin

    first = min(seconds(1) for _ in range(NUM_STREAMS))
    whole = min(seconds(1 + NUM_TOKENS) for _ in range(NUM_STREAMS))
    return found | {"best_token_ms": 1e3 * (whole - first) / NUM_TOKENS}


def compare(model: str) -> dict[str, Any]:
    """One checkpoint's prediction, its measurement, and the ratio of both."""
    begin = time.perf_counter()
    said = subprocess.run([*RUSTVLLM, "inspect", model, "--json"], check=True, stdout=subprocess.PIPE, text=True)
    took = time.perf_counter() - begin
    facts = json.loads(said.stdout)
    done = subprocess.run([sys.executable, __file__, "--one", model], check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    predicted = {"weights_bytes": facts["weights_bytes"]["float32"], "best_token_ms": facts["best_token_ms"]}
    ratios = {key: round(predicted[key] / found[key], 3) for key in predicted}
    print(Path(model).name, f"inspect {took:.2f} s", predicted, found, ratios, file=sys.stderr, flush=True)
    return {"inspect_seconds": took, "predicted": predicted, "found": found, "predicted_over_found": ratios}


def main() -> None:
    """Compare all checkpoints, print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="+", help="GGUF files and folders")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.models[0])), flush=True)
        return
    models = {Path(model).name: compare(model) for model in args.models}
    publish({**new_report(), "models": models}, args.output_json)


if __name__ == "__main__":
    main()
