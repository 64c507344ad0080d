"""Writes a Llama or Qwen3 of a given shape as an AWQ folder (4 bits, groups of 128, zero points) with random numbers.

    python benches/python/random_awq.py llama-160m llama-160m-awq

The time to load and to compute a checkpoint does not depend on its numbers. Any engine can load the folder.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from random_gguf import SHAPES
from safetensors.numpy import save_file
from tiny_checkpoint import copy_tokenizer
from tokenizer_folder import tokenizer_folder

TOKENIZER = tokenizer_folder("slm4096-gpt2/hf")
GROUP = 128
PER_WORD = 8
MODULES = {
    "q_proj": ("self_attn", "width", "hidden"), "k_proj": ("self_attn", "keys", "hidden"),
    "v_proj": ("self_attn", "keys", "hidden"), "o_proj": ("self_attn", "hidden", "width"),
    "gate_proj": ("mlp", "intermediate", "hidden"), "up_proj": ("mlp", "intermediate", "hidden"),
    "down_proj": ("mlp", "hidden", "intermediate"),
}  # fmt: skip


def quantized(outputs: int, inputs: int, random: np.random.Generator) -> dict[str, Any]:
    """The three tensors of a weight with values of about 0.02."""
    words = np.iinfo(np.int32)
    return {
        "qweight": random.integers(words.min, words.max, (inputs, outputs // PER_WORD), np.int32),
        "qzeros": np.full((inputs // GROUP, outputs // PER_WORD), 0x77777777, np.int32),
        "scales": random.uniform(3e-3, 5e-3, (inputs // GROUP, outputs)).astype(np.float16),
    }


def write(folder: Path, shape: dict[str, Any], tokenizer: Path) -> None:
    """Write the whole folder."""
    copy_tokenizer(tokenizer, folder)
    sizes = shape | {"width": shape["heads"] * shape["head_dim"], "keys": shape["kv_heads"] * shape["head_dim"]}
    is_qwen = shape["arch"] == "qwen3"
    config = {
        "architectures": ["Qwen3ForCausalLM" if is_qwen else "LlamaForCausalLM"],
        "model_type": shape["arch"],
        "vocab_size": shape["vocab"],
        "hidden_size": shape["hidden"],
        "intermediate_size": shape["intermediate"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "head_dim": shape["head_dim"],
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": shape["theta"],
        "hidden_act": "silu",
        "tie_word_embeddings": shape["tied"],
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float16",
        "quantization_config": {
            "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    random = np.random.default_rng(0)
    table = (shape["vocab"], shape["hidden"])
    weights: dict[str, Any] = {"model.norm.weight": np.ones(shape["hidden"], np.float16)}
    for name in ("model.embed_tokens", *(() if shape["tied"] else ("lm_head",))):
        weights[f"{name}.weight"] = (0.02 * random.standard_normal(table, np.float32)).astype(np.float16)
    for layer in range(shape["layers"]):
        prefix = f"model.layers.{layer}"
        for name, (block, outputs, inputs) in MODULES.items():
            parts = quantized(sizes[outputs], sizes[inputs], random)
            weights |= {f"{prefix}.{block}.{name}.{part}": numbers for part, numbers in parts.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{norm}.weight"] = np.ones(shape["hidden"], np.float16)
        for part in "qk" if is_qwen else "":
            weights[f"{prefix}.self_attn.{part}_norm.weight"] = np.ones(shape["head_dim"], np.float16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    """Write one folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER, help="a folder with a tokenizer.json")
    args = parser.parse_args()
    write(args.folder, SHAPES[args.shape], args.tokenizer)


if __name__ == "__main__":
    main()
