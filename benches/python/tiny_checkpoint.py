"""``write_tiny_llama``, ``write_llama_160m``, ``write_qwen3_0_6b``, ``write_gpt_oss_0_6b``, ``write_gpt2_small``.

They and their like write checkpoints with seeded random weights, which any engine can load.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

Weights = dict[str, npt.NDArray[np.float32]]

SCRIPT_SCALE = 250.0
"""A position's embedding is that of the token to come, times this factor, which outweighs all that layers add."""
GPT2_IDS = 50_257
"""Tokens of GPT-2's vocabulary: a model of its shape has as many, even with a tokenizer of fewer."""
MXFP4_BLOCK = 32
"""Inputs that share an exponent, and in Q8_0 a scale."""
MXFP4_CONFIG: dict[str, Any] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
"""What the published configurations of gpt-oss say of their numbers."""


def write_tiny_llama(
    folder: Path, tokenizer: Path, *, num_layers: int, hidden_size: int = 64, max_position_embeddings: int = 512
) -> Path:
    """Write a Llama that is so small that the host dominates the cost of a step.

    Args:
        folder: The folder to make, with parents.
        tokenizer: A folder with a tokenizer.json; its vocabulary is the model's.
        num_layers: Layers of about 4 × hidden_size² weights each.
        hidden_size: A multiple of 32, the smallest head that vLLM's kernels for CPUs have.
        max_position_embeddings: The most tokens of prompt and output together.
    """
    heads = hidden_size // 32
    shape = {
        "vocab_size": copy_tokenizer(tokenizer, folder),
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 32,
        "max_position_embeddings": max_position_embeddings,
    }
    return write_llama(folder, shape)


def write_llama_160m(folder: Path, tokenizer: Path) -> Path:
    """Write a Llama with 160 million parameters in float32: 12 layers of 768, 12 heads, 4 KV heads, 32,000 ids.

    Args:
        folder: The folder to make, with parents.
        tokenizer: A folder with a tokenizer.json of at most as many ids.
    """
    copy_tokenizer(tokenizer, folder)
    shape = {
        "vocab_size": 32_000,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 1024,
    }
    return write_llama(folder, shape)


def write_qwen3_0_6b(folder: Path, tokenizer: Path) -> Path:
    """Write Qwen3-0.6B's shape in float32 (2.4 GB): 28 layers of 1,024, 16 heads, 8 KV heads, 151,936 ids, tied."""
    return _write_qwen3(folder, tokenizer, hidden_size=1024, intermediate_size=3072)


def write_qwen3_1_7b(folder: Path, tokenizer: Path) -> Path:
    """Write Qwen3-1.7B's shape in float32 (6.9 GB), like Qwen3-0.6B's with layers of 2,048."""
    return _write_qwen3(folder, tokenizer, hidden_size=2048, intermediate_size=6144)


def _write_qwen3(folder: Path, tokenizer: Path, *, hidden_size: int, intermediate_size: int) -> Path:
    copy_tokenizer(tokenizer, folder)
    shape = {
        "vocab_size": 151_936,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 1024,
    }
    return write_llama(folder, shape, family="qwen3")


def write_qwen3_moe_0_5b(folder: Path, tokenizer: Path) -> Path:
    """Write a Qwen3 with experts and 518 million parameters in float32: 12 layers of 1,024 with 32 experts of 384.

    A token has 8 of the experts of each layer.

    Args:
        folder: The folder to make, with parents.
        tokenizer: A folder with a tokenizer.json of at most as many ids.
    """
    copy_tokenizer(tokenizer, folder)
    shape = {
        "vocab_size": 32_000,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "moe_intermediate_size": 384,
        "num_experts": 32,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 1024,
    }
    return write_llama(folder, shape, "qwen3_moe")


def write_llama(folder: Path, shape: dict[str, int], family: str = "llama") -> Path:
    """Write a Llama of any shape, given by its configuration's names.

    A ``qwen3`` norms its heads and ties its head; a ``qwen3_moe`` has experts besides.
    """
    is_qwen = family != "llama"
    class_name = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}[family]
    config: dict[str, Any] = shape | {
        "model_type": family,
        "rms_norm_eps": 1e-6 if is_qwen else 1e-5,
        "rope_theta": 1e6 if is_qwen else 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": is_qwen,
    }
    if family == "qwen3_moe":
        config["norm_topk_prob"] = True
    _write_config(folder, class_name, config)
    random = np.random.default_rng(0)
    hidden_size, intermediate_size = shape["hidden_size"], shape["intermediate_size"]
    queries, keys = (shape[f"num_{name}_heads"] * shape["head_dim"] for name in ("attention", "key_value"))

    def matrix(rows: int, columns: int) -> npt.NDArray[np.float32]:
        numbers: npt.NDArray[np.float32] = (random.standard_normal((rows, columns)) / np.sqrt(columns)).astype(
            np.float32
        )
        return numbers

    weights: Weights = {
        "model.embed_tokens.weight": matrix(shape["vocab_size"], hidden_size),
        "model.norm.weight": np.ones(hidden_size, np.float32),
    }
    if not is_qwen:
        weights["lm_head.weight"] = matrix(shape["vocab_size"], hidden_size)
    for layer in range(shape["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        for part, rows in (("q", queries), ("k", keys), ("v", keys)):
            weights[f"{name}.self_attn.{part}_proj.weight"] = matrix(rows, hidden_size)
            if is_qwen and part != "v":
                weights[f"{name}.self_attn.{part}_norm.weight"] = np.ones(shape["head_dim"], np.float32)
        weights[f"{name}.self_attn.o_proj.weight"] = matrix(hidden_size, queries)
        mlps = {f"{name}.mlp": intermediate_size}
        if family == "qwen3_moe":
            weights[f"{name}.mlp.gate.weight"] = matrix(shape["num_experts"], hidden_size)
            mlps = {f"{name}.mlp.experts.{i}": shape["moe_intermediate_size"] for i in range(shape["num_experts"])}
        for mlp, size in mlps.items():
            weights |= {f"{mlp}.{part}_proj.weight": matrix(size, hidden_size) for part in ("gate", "up")}
            weights[f"{mlp}.down_proj.weight"] = matrix(hidden_size, size)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{name}.{norm}.weight"] = np.ones(hidden_size, np.float32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_gpt_oss_0_6b(folder: Path, tokenizer: Path) -> Path:
    """Write a gpt-oss with 636 million parameters as it is published: experts in MXFP4, the rest in bfloat16 (0.43 GB).

    12 layers of 704 with 32 experts, of which a token has 4; sinks, YaRN, and a window of 128 tokens in every other
    layer. As in gpt-oss-20b, a head has 64 features, 8 of them share keys and values, and experts are as wide as the
    model.

    The rest's numbers fit Q8_0 exactly: a block of 32 has integers up to 127, which one of them is, times a power of
    two. So a GGUF file of 8 bits can hold the same model.

    Args:
        folder: The folder to make, with parents.
        tokenizer: A folder with a tokenizer.json of at most as many ids.
    """
    copy_tokenizer(tokenizer, folder)
    shape = {
        "vocab_size": 32_000,
        "hidden_size": 704,
        "intermediate_size": 704,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
    }
    return write_gpt_oss(folder, shape)


def write_gpt_oss(folder: Path, shape: dict[str, int]) -> Path:
    """Write a gpt-oss of any shape, given by its configuration's names, in the format of the published folders."""
    import torch
    from safetensors.torch import save_file as save_tensors

    windows = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(shape["num_hidden_layers"])]
    config: dict[str, Any] = shape | {
        "model_type": "gpt_oss",
        "attention_bias": True,
        "experts_per_token": shape["num_experts_per_tok"],
        "hidden_act": "silu",
        "initial_context_length": 4096,
        "layer_types": windows,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "rope_theta": 150_000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "quantization_config": MXFP4_CONFIG,
    }
    _write_config(folder, "GptOssForCausalLM", config)
    random = np.random.default_rng(0)
    hidden, inner, experts = (shape[key] for key in ("hidden_size", "intermediate_size", "num_local_experts"))
    heads = shape["num_attention_heads"]
    queries, keys = (count * shape["head_dim"] for count in (heads, shape["num_key_value_heads"]))
    tensors: dict[str, torch.Tensor] = {}

    def add(name: str, array: npt.NDArray[Any]) -> None:
        """Numbers as bfloat16; bytes as they are."""
        tensor = torch.from_numpy(array)
        tensors[name] = tensor if array.dtype == np.uint8 else tensor.bfloat16()

    def add_dense(name: str, rows: int, columns: int) -> None:
        """A matrix in 8-bit integers times a power of two, and its bias."""
        scale = 2.0 ** np.round(np.log2(3.3 / 127 / np.sqrt(columns)))
        numbers = random.standard_normal((rows, columns)) / np.sqrt(columns) / scale
        blocks = np.clip(np.round(numbers), -127, 127).reshape(-1, MXFP4_BLOCK)
        largest = np.abs(blocks).argmax(1)[:, None]
        np.put_along_axis(blocks, largest, np.copysign(127, np.take_along_axis(blocks, largest, 1)), 1)
        add(name + ".weight", blocks.reshape(rows, columns) * scale)

    def add_vector(name: str, *shape: int, deviation: float = 0.1, mean: float = 0.0) -> None:
        """Normally distributed numbers."""
        add(name, mean + deviation * random.standard_normal(shape))

    def add_experts(name: str, rows: int, columns: int) -> None:
        """A map of all experts: every code as often as every other, and two exponents."""
        groups = (experts, rows, columns // MXFP4_BLOCK)
        exponent = round(127 - np.log2(3 * np.sqrt(columns)))
        add(name + "_blocks", random.integers(0, 256, (*groups, MXFP4_BLOCK // 2), np.uint8))
        add(name + "_scales", random.integers(exponent, exponent + 2, groups, np.uint8))
        add_vector(name + "_bias", experts, rows)

    add_dense("model.embed_tokens", shape["vocab_size"], hidden)
    add_dense("lm_head", shape["vocab_size"], hidden)
    add_vector("model.norm.weight", hidden, deviation=0.0, mean=1.0)
    for layer in range(shape["num_hidden_layers"]):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        for part, rows, columns in (
            ("q", queries, hidden),
            ("k", keys, hidden),
            ("v", keys, hidden),
            ("o", hidden, queries),
        ):
            add_dense(f"{attention}.{part}_proj", rows, columns)
            add_vector(f"{attention}.{part}_proj.bias", rows)
        add_vector(f"{attention}.sinks", heads, deviation=1.0)
        add_dense(f"{mlp}.router", experts, hidden)
        add_vector(f"{mlp}.router.bias", experts)
        add_experts(f"{mlp}.experts.gate_up_proj", 2 * inner, hidden)
        add_experts(f"{mlp}.experts.down_proj", hidden, inner)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            add_vector(f"model.layers.{layer}.{norm}.weight", hidden, deviation=0.0, mean=1.0)
    save_tensors(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_gpt2_small(
    folder: Path, tokenizer: Path, *, num_positions: int = 1024, script: Sequence[int] = (), num_layers: int = 12
) -> Path:
    """Write GPT-2 small's shape (124 million parameters, float32, 498 MB) with GPT-2's tokenizer.

    Args:
        folder: The folder to make, with parents.
        tokenizer: A folder with a tokenizer.json.
        num_positions: The most tokens of prompt and output together.
        script: What the model says: at index ``p``, the id that it chooses greedily after any ``p + 1`` tokens. Such a
            model computes as much as any other of the shape.
        num_layers: Fewer for a smaller model.
    """
    vocab_size = max(GPT2_IDS, copy_tokenizer(tokenizer, folder))
    hidden_size = 768
    config = {
        "model_type": "gpt2",
        "vocab_size": vocab_size,
        "n_positions": num_positions,
        "n_ctx": num_positions,
        "n_embd": hidden_size,
        "n_layer": num_layers,
        "n_head": 12,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": vocab_size - 1,
        "eos_token_id": vocab_size - 1,
    }
    _write_config(folder, "GPT2LMHeadModel", config)
    random = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> npt.NDArray[np.float32]:
        return 0.02 * random.standard_normal((rows, columns), dtype=np.float32)

    weights: Weights = {
        "wte.weight": matrix(vocab_size, hidden_size),
        "wpe.weight": matrix(num_positions, hidden_size),
    }
    if len(script) > 0:
        weights["wpe.weight"][: len(script)] = SCRIPT_SCALE * weights["wte.weight"][np.asarray(script)]
    norms = ["ln_f"]
    for layer in range(num_layers):
        norms += [f"h.{layer}.ln_1", f"h.{layer}.ln_2"]
        for part, rows, columns in (
            ("attn.c_attn", hidden_size, 3 * hidden_size),
            ("attn.c_proj", hidden_size, hidden_size),
            ("mlp.c_fc", hidden_size, 4 * hidden_size),
            ("mlp.c_proj", 4 * hidden_size, hidden_size),
        ):
            weights[f"h.{layer}.{part}.weight"] = matrix(rows, columns)
            weights[f"h.{layer}.{part}.bias"] = np.zeros(columns, np.float32)
    for norm in norms:
        weights[f"{norm}.weight"] = np.ones(hidden_size, np.float32)
        weights[f"{norm}.bias"] = np.zeros(hidden_size, np.float32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _write_config(folder: Path, class_name: str, config: dict[str, Any]) -> None:
    """Write a ``config.json`` in float32 and without special tokens, unless ``config`` says otherwise."""
    common = {"architectures": [class_name], "bos_token_id": None, "eos_token_id": None, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(common | config, indent=2))


def copy_tokenizer(tokenizer: Path, folder: Path) -> int:
    """Copy a tokenizer into a model's folder.

    Returns:
        The number of its ids.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(tokenizer / "tokenizer.json", folder)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    largest: int = max([*content["model"]["vocab"].values(), *(token["id"] for token in content["added_tokens"])])
    return 1 + largest
