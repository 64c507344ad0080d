"""Measures what a draft model gains (``method: draft_model``): tokens per second with and without it, alternating.

    python benches/python/draft_model_gain.py --num-speculative-tokens 4 --streams 1 8 --output-json report.json

The model is a Llama of 16 layers of 768 over 6,400 ids with random weights. The draft model is its first two layers
with its embedding, last norm and head. The output that the other layers add to the hidden states is scaled down
(``--later-layers``), because trained models of one family agree on most tokens; the report has the resulting share of
right guesses. The model generates greedily after random ids. Requests with and without drafts alternate step by step in
one process; the script measures decoding, from the first token on.
"""

import argparse
import json
import random
import re
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench_report import new_report, publish
from safetensors.numpy import load_file, save_file
from speculation import COUNTERS, DATA, Scripted
from tiny_checkpoint import copy_tokenizer, write_llama

NUM_LAYERS, NUM_DRAFT_LAYERS, HIDDEN_SIZE, PROMPT_LEN = 16, 2, 768, 64
MAX_MODEL_LEN = 512


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--later-layers", type=float, default=0.02, help="scale of what layers beyond the second add")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=128, help="per stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokenizer", type=Path, default=DATA / "modern-tokenizers/minimind")
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        model, draft = write_pair(Path(temporary), args.tokenizer, args.later_layers)
        common: dict[str, Any] = {"max_num_seqs": max(args.streams), "max_model_len": MAX_MODEL_LEN}
        config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": args.num_speculative_tokens}
        engines = {
            "without": Scripted(str(model), **common),
            "with": Scripted(str(model), **common, speculative_config=config),
        }
        num_ids = json.loads((model / "config.json").read_text())["vocab_size"]
        results = []
        for num_streams in args.streams:
            results.append(measure(engines, num_streams, num_ids, args))
            print(results[-1], file=sys.stderr, flush=True)
    settings = {
        "num_speculative_tokens": args.num_speculative_tokens,
        "layers": [NUM_LAYERS, NUM_DRAFT_LAYERS],
        "hidden_size": HIDDEN_SIZE,
        "scale_of_later_layers": args.later_layers,
    }
    publish({**new_report(), "settings": settings, "results": results}, args.output_json)


def write_pair(folder: Path, tokenizer: Path, scale: float) -> tuple[Path, Path]:
    """Write a model and a draft model of its first layers; returns both folders."""
    model, draft = folder / "model", folder / "draft"
    shape = {
        "vocab_size": copy_tokenizer(tokenizer, model),
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 2048,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": HIDDEN_SIZE // 64,
        "num_key_value_heads": HIDDEN_SIZE // 64,
        "head_dim": 64,
        "max_position_embeddings": MAX_MODEL_LEN,
    }
    write_llama(model, shape)
    weights = load_file(model / "model.safetensors")
    layers = {name: int(found[1]) for name in weights if (found := re.search(r"\.layers\.(\d+)\.", name))}
    for name, layer in layers.items():
        if layer >= NUM_DRAFT_LAYERS and name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] *= scale
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    first = {name: each for name, each in weights.items() if layers.get(name, 0) < NUM_DRAFT_LAYERS}
    shutil.copytree(model, draft, ignore=shutil.ignore_patterns("model.safetensors"))
    save_file(first, draft / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": NUM_DRAFT_LAYERS}
    (draft / "config.json").write_text(json.dumps(config, indent=2))
    return model, draft


def measure(engines: dict[str, Scripted], num_streams: int, num_ids: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure ``num_streams`` streams at once, in alternating turns."""
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    before: dict[str, int] = {}
    num_same = num_all = 0
    for turn in range(-1, args.rounds):  # the first warms up
        source = random.Random(f"{turn} {num_streams}")
        prompts = [[source.randrange(10, num_ids) for _ in range(PROMPT_LEN)] for _ in range(num_streams)]
        if turn == 0:
            before = engines["with"].counters()
        for engine in engines.values():
            engine.begin([{"prompt_token_ids": ids} for ids in prompts], args.tokens)
        unfinished = list(engines.values())
        while unfinished:
            unfinished = [engine for engine in unfinished if engine.step()]
        if turn < 0:
            continue
        for name, engine in engines.items():
            begins, ends = ([max(times[at][kind] for times in engine.times) for kind in (0, 1)] for at in (0, -1))
            num_decoded = num_streams * (args.tokens - 1)
            wall, cpu = (num_decoded / (end - begin) for begin, end in zip(begins, ends, strict=True))
            runs[name].append((wall, cpu))
        for ours, theirs in zip(engines["with"].token_ids, engines["without"].token_ids, strict=True):
            num_same += next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))
            num_all += len(ours)
    after = engines["with"].counters()
    counted = {name: after[name] - before[name] for name in COUNTERS}
    pairs = list(zip(runs["with"], runs["without"], strict=True))
    ratios = [[of[kind] / without[kind] for of, without in pairs] for kind in (0, 1)]
    return {
        "streams": num_streams,
        "tokens_per_second": {name: round(statistics.median(wall for wall, _ in of), 1) for name, of in runs.items()},
        "ratio": round(statistics.median(ratios[0]), 3),
        "ratios": [round(ratio, 3) for ratio in ratios[0]],
        "ratio_of_processor_time": round(statistics.median(ratios[1]), 3),
        "share_of_guesses_that_were_right": round(
            counted["num_accepted_tokens"] / max(1, counted["num_draft_tokens"]), 3
        ),
        "tokens_before_the_first_that_differs": round(num_same / num_all, 4),
        "counted": counted,
    }


if __name__ == "__main__":
    main()
