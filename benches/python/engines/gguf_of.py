"""Writes a GPT-2, Llama, Qwen3 or Qwen3-MoE checkpoint as GGUF, in float32 and quantized by llama.cpp.

    lcpp/bin/python benches/python/engines/gguf_of.py gpt2-small out           # out-f32.gguf, out-q8_0.gguf
    lcpp/bin/python benches/python/engines/gguf_of.py llama-160m out bf16 q8_0 q4_k_m

It needs ``gguf``, ``llama-cpp-python`` and ``safetensors``; tensors have llama.cpp's names.
"""

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

GPT2_PARTS = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
LLAMA_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def main() -> None:
    """Write the files."""
    import llama_cpp

    folder, stem = Path(sys.argv[1]), sys.argv[2]
    target = f"{stem}-f32.gguf"
    write(folder, target)
    for form in sys.argv[3:] or ["q8_0"]:
        settings = llama_cpp.llama_model_quantize_default_params()
        settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{form.upper()}")
        if llama_cpp.llama_model_quantize(target.encode(), f"{stem}-{form}.gguf".encode(), settings) != 0:
            raise SystemExit(f"llama.cpp did not quantise it to {form}")


def write(folder: Path, target: str) -> None:
    """Write the checkpoint in float32."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    weights = {
        name.removeprefix("transformer.").removeprefix("model."): w
        for name, w in load_file(folder / "model.safetensors").items()
    }
    is_llama = config["model_type"] in ("llama", "qwen3", "qwen3_moe")
    writer = gguf.GGUFWriter(target, config["model_type"].replace("_", ""))
    add_tokenizer(writer, folder, config)
    tensors = llama_tensors(writer, config, weights) if is_llama else gpt2_tensors(writer, config, weights)
    for name, weight in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(weight, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gpt2_tensors(writer: Any, config: dict[str, Any], weights: dict[str, Any]) -> dict[str, Any]:
    """GPT-2's tensors by llama.cpp's names; its weights are stored transposed."""
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_block_count(config["n_layer"])
    writer.add_feed_forward_length(config.get("n_inner") or 4 * config["n_embd"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    tensors = {
        "token_embd.weight": weights["wte.weight"],
        "output.weight": weights["wte.weight"],  # tied
        "position_embd.weight": weights["wpe.weight"],
    }
    for part in ("weight", "bias"):
        tensors[f"output_norm.{part}"] = weights[f"ln_f.{part}"]
        for layer in range(config["n_layer"]):
            for theirs, ours in GPT2_PARTS.items():
                weight = weights[f"h.{layer}.{ours}.{part}"]
                tensors[f"blk.{layer}.{theirs}.{part}"] = weight.T if weight.ndim == 2 else weight
    return tensors


def llama_tensors(writer: Any, config: dict[str, Any], weights: dict[str, Any]) -> dict[str, Any]:
    """A Llama's tensors by llama.cpp's names; llama.cpp interleaves the two halves of each query and key head. A Qwen3
    keeps their order, and norms its heads.
    """
    is_qwen, has_experts = config["model_type"] != "llama", "num_experts" in config
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads["attn_q"])
    writer.add_head_count_kv(heads["attn_k"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    if has_experts:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    tensors = {
        "token_embd.weight": weights["embed_tokens.weight"],
        "output_norm.weight": weights["norm.weight"],
    }
    if "lm_head.weight" in weights:
        tensors["output.weight"] = weights["lm_head.weight"]
    for layer in range(config["num_hidden_layers"]):
        for theirs, ours in LLAMA_PARTS.items():
            if has_experts and theirs.startswith("ffn_") and theirs != "ffn_norm":
                part = ours.removeprefix("mlp.")
                names = [f"layers.{layer}.mlp.experts.{i}.{part}.weight" for i in range(config["num_experts"])]
                tensors[f"blk.{layer}.{theirs}_exps.weight"] = np.stack([weights[name] for name in names])
                continue
            weight = weights[f"layers.{layer}.{ours}.weight"]
            if theirs in heads and not is_qwen:
                halves = weight.reshape(heads[theirs], 2, config["head_dim"] // 2, -1)
                weight = halves.swapaxes(1, 2).reshape(weight.shape)
            tensors[f"blk.{layer}.{theirs}.weight"] = weight
        if has_experts:
            tensors[f"blk.{layer}.ffn_gate_inp.weight"] = weights[f"layers.{layer}.mlp.gate.weight"]
        for part in "qk" if is_qwen else "":
            norm = weights[f"layers.{layer}.self_attn.{part}_norm.weight"]
            tensors[f"blk.{layer}.attn_{part}_norm.weight"] = norm
    return tensors


def add_tokenizer(writer: Any, folder: Path, config: dict[str, Any]) -> None:
    """Add the vocabulary and the merges, because llama.cpp loads no model without."""
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
    writer.add_token_merges(merges or ["a b"])  # llama.cpp needs at least one
    writer.add_bos_token_id(config["bos_token_id"] or 0)
    writer.add_eos_token_id(config["eos_token_id"] or 0)


if __name__ == "__main__":
    main()
