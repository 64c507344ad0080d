"""Writes a gpt-oss folder with experts in MXFP4 as GGUF: their own codes, and Q8_0 for the rest, as llama.cpp has it.

    python benches/python/mxfp4_gguf.py gpt-oss-0.6b gpt-oss-0.6b/gpt-oss-0.6b-mxfp4.gguf

The folders of ``write_gpt_oss_0_6b`` fit Q8_0 exactly, so both engines compute with the same numbers; numbers of other
folders that are not a block's integers are rounded. ``--form f32`` writes what the codes mean as F32 instead, which
llama.cpp multiplies without rounding activations. ``gguf`` must be installed.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from engines.gguf_of import add_tokenizer
from gguf import GGMLQuantizationType as Type
from safetensors import safe_open
from tiny_checkpoint import MXFP4_BLOCK

PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""Of the 16 codes."""


class Folder:
    """The tensors of a folder.

    Args:
        path: Of the folder, with one safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path / "model.safetensors", "pt")
        self._names = frozenset(self._file.keys())

    def has(self, name: str) -> bool:
        """Whether the folder has the tensor."""
        return name in self._names

    def floats(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor in floating point."""
        array: npt.NDArray[np.float32] = self._file.get_tensor(name).float().numpy()
        return array

    def codes(self, name: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """Codes ``[experts, outputs, groups, 32]`` and exponents ``[experts, outputs, groups]`` of a stack."""
        blocks: npt.NDArray[np.uint8] = self._file.get_tensor(f"{name}_blocks").numpy()
        codes = np.stack((blocks & 15, blocks >> 4), -1).reshape(*blocks.shape[:-1], MXFP4_BLOCK)
        return codes, self._file.get_tensor(f"{name}_scales").numpy()


def add_experts(
    writer: Any, name: str, codes: npt.NDArray[np.uint8], exponents: npt.NDArray[np.uint8], form: str
) -> None:
    """Add a map of all experts; a file has the first 16 codes of a block in the lower halves of its bytes."""
    if form == "f32":
        numbers = VALUES[codes] * np.exp2(exponents.astype(np.float32) - 127)[..., None]
        writer.add_tensor(name, numbers.reshape(*numbers.shape[:2], -1))
        return
    half = MXFP4_BLOCK // 2
    packed = codes[..., :half] | codes[..., half:] << 4
    blocks = np.concatenate((exponents[..., None], packed), -1)
    writer.add_tensor(name, blocks.reshape(*blocks.shape[:2], -1), raw_dtype=Type.MXFP4)


def add_matrix(writer: Any, name: str, weight: npt.NDArray[np.float32], form: str) -> None:
    """Add a dense layer's weight."""
    if form == "f32":
        writer.add_tensor(name, weight)
    else:
        writer.add_tensor(name, gguf.quants.quantize(weight, Type.Q8_0), raw_dtype=Type.Q8_0)


def add_layer(writer: Any, folder: Folder, layer: int, form: str) -> None:
    """Add all tensors of a layer."""
    prefix = f"model.layers.{layer}"
    for theirs, ours in PARTS.items():
        for kind in ("weight", "bias"):
            if not folder.has(f"{prefix}.{ours}.{kind}"):
                continue
            array = folder.floats(f"{prefix}.{ours}.{kind}")
            name = f"blk.{layer}.{theirs}.{kind}"
            if array.ndim == 2 and theirs != "ffn_gate_inp":  # a router stays in F32
                add_matrix(writer, name, array, form)
            else:
                writer.add_tensor(name, array)
    writer.add_tensor(f"blk.{layer}.attn_sinks.weight", folder.floats(f"{prefix}.self_attn.sinks"))
    experts = f"{prefix}.mlp.experts"
    codes, exponents = folder.codes(f"{experts}.gate_up_proj")
    bias = folder.floats(f"{experts}.gate_up_proj_bias")
    for place, part in enumerate(("gate", "up")):
        name = f"blk.{layer}.ffn_{part}_exps"
        add_experts(writer, f"{name}.weight", codes[:, place::2], exponents[:, place::2], form)
        writer.add_tensor(f"{name}.bias", np.ascontiguousarray(bias[:, place::2]))
    add_experts(writer, f"blk.{layer}.ffn_down_exps.weight", *folder.codes(f"{experts}.down_proj"), form)
    writer.add_tensor(f"blk.{layer}.ffn_down_exps.bias", folder.floats(f"{experts}.down_proj_bias"))


def write(source: Path, target: Path, form: str) -> None:
    """Write the file."""
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    folder = Folder(source)
    writer = gguf.GGUFWriter(target, "gpt-oss")
    add_tokenizer(writer, source, config)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    rope = config["rope_scaling"]
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    for name, ours in (("token_embd", "model.embed_tokens"), ("output", "lm_head")):
        add_matrix(writer, f"{name}.weight", folder.floats(f"{ours}.weight"), form)
    writer.add_tensor("output_norm.weight", folder.floats("model.norm.weight"))
    for layer in range(config["num_hidden_layers"]):
        add_layer(writer, folder, layer, form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Write one file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("path", type=Path, help="of the file to write")
    parser.add_argument("--form", choices=("mxfp4", "f32"), default="mxfp4")
    args = parser.parse_args()
    write(args.folder, args.path, args.form)


if __name__ == "__main__":
    main()
