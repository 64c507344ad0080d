"""Writes a GPT-2 checkpoint as GGUF, in float32 and in q8_0, for the comparison with llama.cpp.

    lcpp/bin/python benches/python/engines/gguf_of_gpt2.py gpt2-small out     # out-f32.gguf, out-q8_0.gguf

Runs where ``gguf``, ``llama-cpp-python`` and ``safetensors`` are; the names of tensors are llama.cpp's.
"""

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from safetensors.numpy import load_file

LAYER_PARTS = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


def main() -> None:
    """Write both files."""
    folder, stem = Path(sys.argv[1]), sys.argv[2]
    target = f"{stem}-f32.gguf"
    write(folder, target)
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0
    if llama_cpp.llama_model_quantize(target.encode(), f"{stem}-q8_0.gguf".encode(), settings) != 0:
        raise SystemExit("llama.cpp did not quantise it")


def write(folder: Path, target: str) -> None:
    """The checkpoint as it is, in float32."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    weights = {name.removeprefix("transformer."): w for name, w in load_file(folder / "model.safetensors").items()}
    writer = gguf.GGUFWriter(target, "gpt2")
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_block_count(config["n_layer"])
    writer.add_feed_forward_length(config.get("n_inner") or 4 * config["n_embd"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    add_tokenizer(writer, folder, config)

    def add(name: str, weight: Any) -> None:
        writer.add_tensor(name, np.ascontiguousarray(weight, np.float32))

    add("token_embd.weight", weights["wte.weight"])
    add("output.weight", weights["wte.weight"])  # tied
    add("position_embd.weight", weights["wpe.weight"])
    for part in ("weight", "bias"):
        add(f"output_norm.{part}", weights[f"ln_f.{part}"])
        for layer in range(config["n_layer"]):
            for theirs, ours in LAYER_PARTS.items():
                weight = weights[f"h.{layer}.{ours}.{part}"]
                add(f"blk.{layer}.{theirs}.{part}", weight.T if weight.ndim == 2 else weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: Any, folder: Path, config: dict[str, Any]) -> None:
    """The vocabulary and the merges; llama.cpp loads no model without."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    names = [f"<unused {index}>" for index in range(config["vocab_size"])]
    for name, index in tokenizer["model"]["vocab"].items():
        names[index] = name
    for token in tokenizer.get("added_tokens", []):
        names[token["id"]] = token["content"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(names))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


if __name__ == "__main__":
    main()
