"""Writes a GGUF file of a model's shape with random numbers, and with the tensor types that llama.cpp would choose.

    python benches/python/random_gguf.py qwen3-1.7b q4_k_m qwen3-1.7b-q4_k_m.gguf

The script needs no checkpoint, and no more memory than the largest tensor. The time to load and to compute a file does
not depend on its numbers. Any engine can load the file. ``gguf`` must be installed.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type

SHAPES = {
    "llama-160m": {
        "arch": "llama", "vocab": 32_000, "hidden": 768, "intermediate": 2048, "layers": 12, "heads": 12,
        "kv_heads": 4, "head_dim": 64, "theta": 1e4, "tied": False,
    },
    "qwen3-0.6b": {
        "arch": "qwen3", "vocab": 151_936, "hidden": 1024, "intermediate": 3072, "layers": 28, "heads": 16,
        "kv_heads": 8, "head_dim": 128, "theta": 1e6, "tied": True,
    },
    "qwen3-1.7b": {
        "arch": "qwen3", "vocab": 151_936, "hidden": 2048, "intermediate": 6144, "layers": 28, "heads": 16,
        "kv_heads": 8, "head_dim": 128, "theta": 1e6, "tied": True,
    },
}  # fmt: skip
FORMS = ("q8_0", "q4_0", "q4_k_m", "q5_k_m", "q6_k", "bf16", "f16")
SCALES: dict[Type, tuple[tuple[int, float], ...]] = {
    # where the 16-bit scales of a block are, and values that make weights of about 0.02
    Type.Q8_0: ((0, 3e-4),), Type.Q4_0: ((0, 5e-3),), Type.Q4_K: ((0, 2e-4), (2, 1.5e-3)),
    Type.Q5_K: ((0, 1e-4), (2, 1.5e-3)), Type.Q6_K: ((208, 4e-5),),
}  # fmt: skip


def type_of(name: str, form: str, layer: int, num_layers: int) -> Type:
    """The type that llama.cpp chooses; in a form with one type, ``token_embd`` and ``output`` are Q8_0 or Q6_K."""
    is_head = name in ("token_embd", "output")
    if form in ("q8_0", "q6_k", "bf16", "f16"):
        return Type[form.upper()]
    if form == "q4_0":
        return Type.Q6_K if is_head else Type.Q4_0
    base = Type.Q4_K if form == "q4_k_m" else Type.Q5_K
    eighth = num_layers // 8
    has_more = layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
    return Type.Q6_K if is_head or (name in ("attn_v", "ffn_down") and has_more) else base


def blocks_of(rows: int, columns: int, kind: Type, random: np.random.Generator) -> npt.NDArray[Any]:
    """Random numbers in the format of a file."""
    if kind in (Type.BF16, Type.F16):
        weight = 0.02 * random.standard_normal((rows, columns), np.float32)
        return weight.astype(np.float16) if kind == Type.F16 else (weight.view(np.uint32) >> 16).astype(np.uint16)
    numbers, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (rows * columns // numbers, num_bytes), np.uint8)
    for place, scale in SCALES[kind]:
        values = (random.uniform(0.5, 1.0, len(blocks)) * scale).astype(np.float16)
        blocks[:, place : place + 2] = values.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def tensors_of(shape: dict[str, Any], form: str) -> Iterator[tuple[str, tuple[int, int], Type]]:
    """Names, shapes and types of all matrices."""
    hidden, width = shape["hidden"], shape["heads"] * shape["head_dim"]
    keys = shape["kv_heads"] * shape["head_dim"]
    parts = {
        "attn_q": (width, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, width),
        "ffn_gate": (shape["intermediate"], hidden),
        "ffn_up": (shape["intermediate"], hidden),
        "ffn_down": (hidden, shape["intermediate"]),
    }
    for name in ("token_embd", *(() if shape["tied"] else ("output",))):
        yield f"{name}.weight", (shape["vocab"], hidden), type_of(name, form, 0, shape["layers"])
    for layer in range(shape["layers"]):
        for name, size in parts.items():
            yield f"blk.{layer}.{name}.weight", size, type_of(name, form, layer, shape["layers"])


def write(path: Path, shape: dict[str, Any], form: str) -> None:
    """Write the whole file."""
    writer = gguf.GGUFWriter(path, shape["arch"])
    writer.add_context_length(4096)
    writer.add_embedding_length(shape["hidden"])
    writer.add_block_count(shape["layers"])
    writer.add_feed_forward_length(shape["intermediate"])
    writer.add_head_count(shape["heads"])
    writer.add_head_count_kv(shape["kv_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(shape["theta"])
    writer.add_rope_dimension_count(shape["head_dim"])
    writer.add_vocab_size(shape["vocab"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"<{index}>" for index in range(shape["vocab"] - 3)] + ["a", "b", "ab"])
    writer.add_token_types([gguf.TokenType.NORMAL] * shape["vocab"])
    writer.add_token_merges(["a b"])  # llama.cpp needs at least one
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    matrices = list(tensors_of(shape, form))
    norms = {"output_norm.weight": shape["hidden"]}
    for layer in range(shape["layers"]):
        norms |= {f"blk.{layer}.{name}_norm.weight": shape["hidden"] for name in ("attn", "ffn")}
        if shape["arch"] == "qwen3":
            norms |= {f"blk.{layer}.attn_{part}_norm.weight": shape["head_dim"] for part in "qk"}
    for name, size, kind in matrices:
        numbers, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        row_bytes = size[1] // numbers * num_bytes
        dtype = np.dtype(np.float16 if kind == Type.F16 else np.uint8)
        stored = size if kind == Type.F16 else (size[0], row_bytes)
        writer.add_tensor_info(name, stored, dtype, size[0] * row_bytes, None if kind == Type.F16 else kind)
    for name, length in norms.items():
        writer.add_tensor_info(name, (length,), np.dtype(np.float32), 4 * length)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.default_rng(0)
    for _, size, kind in matrices:
        writer.write_tensor_data(blocks_of(*size, kind, random).view(np.uint8))
    for length in norms.values():
        writer.write_tensor_data(np.ones(length, np.float32))
    writer.close()


def main() -> None:
    """Write one file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("form", choices=FORMS)
    parser.add_argument("path", type=Path)
    args = parser.parse_args()
    write(args.path, SHAPES[args.shape], args.form)


if __name__ == "__main__":
    main()
