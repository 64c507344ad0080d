"""Measures what narrow weights, caches and rounded activations cost on the CPU: perplexity, and changed best tokens.

    python benches/python/quantization_cost.py --text FILE [--model FOLDER] [--variants float32 bfloat16 int8 int4-g32]
        [--num-windows 32] [--output-json FILE]

The perplexity is that of a text in windows of the model's length. Each token but a window's first is predicted from
those before it in the window, by the model's own log-probabilities in the precision that it serves in. Without
``--model`` the script uses the embedded model; ``--text`` should be a text that the model was made for.
``decode_cost.py`` measures the speed of narrow weights, with a model that is large enough for a difference.
"""

import argparse
import math
import os
from pathlib import Path
from typing import Any

from bench_report import new_report, publish

import rustvllm.executor  # noqa: F401 -- before anything loads torch, because it sets how torch's threads wait
from rustvllm import _core
from rustvllm.config.engine_args import EngineArgs

VARIANTS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16-cache": {"dtype": "float32", "kv_cache_dtype": "bfloat16"},
    "int8-cache": {"dtype": "float32", "kv_cache_dtype": "int8_per_token_head"},
    "int8": {"dtype": "float32", "quantization": "int8"},
    "int8-bfloat16-cache": {"dtype": "float32", "quantization": "int8", "kv_cache_dtype": "bfloat16"},
    "int8-int8-cache": {"dtype": "float32", "quantization": "int8", "kv_cache_dtype": "int8_per_token_head"},
    "int8-g32": {"dtype": "float32", "quantization": "int8-g32"},
    "int8-g64": {"dtype": "float32", "quantization": "int8-g64"},
    "int4-g32": {"dtype": "float32", "quantization": "int4-g32"},
    "int4-g64": {"dtype": "float32", "quantization": "int4-g64"},
    "int4-g128": {"dtype": "float32", "quantization": "int4-g128"},
}
FLOAT_ACTIVATIONS = "-float"
"""The end of the name of a variant that does not round activations."""
VARIANTS |= {f"{name}{FLOAT_ACTIVATIONS}": args for name, args in VARIANTS.items() if "quantization" in args}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the model inside the package")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--num-windows", type=int, default=32)
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    report = new_report()
    text = args.text.read_text(encoding="utf-8")
    report["text"] = str(args.text)
    report["variants"] = {}
    first_ids: dict[str, Any] = {}
    for name in args.variants:
        os.environ["RUSTVLLM_ACTIVATIONS"] = "float" if name.endswith(FLOAT_ACTIVATIONS) else "int8"
        report["variants"][name], first_ids[name] = measure(args.model, VARIANTS[name], text, args.num_windows)
    for name, ids in first_ids.items():
        other = first_ids.get(name + FLOAT_ACTIVATIONS)
        if other is not None:
            share = 100 * float((ids == other).double().mean())
            report["variants"][name]["same_first_token_as_float_activations_percent"] = round(share, 3)
    plain = report["variants"].get("float32")
    for name, found in report["variants"].items() if plain else ():
        found["perplexity_change_percent"] = round(100 * (found["perplexity"] / plain["perplexity"] - 1), 4)
        share = 100 * float((first_ids[name] == first_ids["float32"]).double().mean())
        found["same_first_token_as_float32_percent"] = round(share, 3)
    publish(report, args.output_json)


def measure(model: str | None, variant: dict[str, str], text: str, num_windows: int) -> tuple[dict[str, Any], Any]:
    """Perplexity, and the number of tokens it covers; and the likeliest token of each position."""
    import torch

    from rustvllm.attention.metadata import AttentionMetadata
    from rustvllm.worker.worker import Worker

    config = EngineArgs(model=model, device="cpu", **variant).create_engine_config("llm_class")
    worker = Worker(config, _core.SAMPLING_FLOAT_COLUMNS, _core.SAMPLING_INT_COLUMNS)
    worker.load_model()
    assert worker.runner is not None
    runner = worker.runner
    length, block_size = config.model.max_model_len, config.cache.block_size
    ids = token_ids(config.model.tokenizer_path or config.model.path, text)
    spec = runner.model.kv_cache_spec
    num_blocks = -(-length // block_size)
    total, count = 0.0, 0
    first_ids = []
    with torch.inference_mode():
        for begin in range(0, min(len(ids), num_windows * length), length):
            window = torch.tensor(ids[begin : begin + length], dtype=torch.int32)
            if len(window) < 2:
                break
            positions = torch.arange(len(window), dtype=torch.int32)
            lens = torch.tensor([0, len(window)], dtype=torch.int32).numpy()
            table = torch.arange(1, num_blocks + 1, dtype=torch.int32)[None]
            plan = runner.backend.plan(AttentionMetadata(block_size, table, positions + block_size, lens, lens[1:]))
            shape = spec.layer_shape(num_blocks + 1, block_size, worker.cache_dtype)
            caches = [torch.zeros(shape, dtype=worker.cache_dtype) for _ in range(spec.num_layers)]
            hidden = runner.model(window, positions, caches, plan)
            logprobs = runner.model.compute_logits(hidden).double().log_softmax(-1)
            total -= float(logprobs[:-1].gather(1, window[1:, None].long()).sum())
            count += len(window) - 1
            first_ids.append(logprobs.argmax(-1))
    worker.shutdown()
    return {"perplexity": round(math.exp(total / count), 6), "num_tokens": count}, torch.cat(first_ids)


def token_ids(folder: Path, text: str) -> list[int]:
    """The text's tokens, without tokens that mark its beginning."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


if __name__ == "__main__":
    main()
