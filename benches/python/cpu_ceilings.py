"""Limits of a processor: ``machine_rates`` measures them, ``model_ceilings`` says what a model could reach."""

import time
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from rustvllm import _core

READ_OUTPUTS, READ_INPUTS = 49_152, 2048
"""Shape of the weight that is read: 384 MiB, which fit into no cache."""
PACKED_TOGETHER = 4096
NUM_READINGS = 5
ARITHMETIC: Mapping[str, Literal["f32", "bf16", "int8"]] = {"f32": "f32", "bf16": "bf16"}
"""The type in which weights of a kind are multiplied; those of 8 and 4 bits in int8."""
BYTES = {"f32": 4.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5}
SCALE_BYTES = 2
"""Of a group's scale, where activations are rounded to 8 bits, too."""


def machine_rates(num_threads: int) -> dict[str, float]:
    """Bytes per second that threads read with prefetching, and operations per second from registers; 0 if none."""
    threads = _core.CpuThreads(num_threads)
    layer = _core.PackedLinear(threads, READ_OUTPUTS, READ_INPUTS, "f32")
    rows = np.zeros((PACKED_TOGETHER, READ_INPUTS), np.float32)
    for first in range(0, READ_OUTPUTS, PACKED_TOGETHER):
        layer.pack_rows(first, rows)
    seconds = []
    for _ in range(NUM_READINGS):
        begin = time.perf_counter()
        layer.read()
        seconds.append(time.perf_counter() - begin)
    kinds: tuple[Literal["f32", "bf16", "int8"], ...] = ("f32", "bf16", "int8")
    return {"bytes_read": layer.nbytes / min(seconds)} | {kind: threads.peak(kind) or 0.0 for kind in kinds}


def model_ceilings(
    config: Mapping[str, Any], weights: str, rates: Mapping[str, float], load: tuple[int, int, int]
) -> dict[str, float]:
    """The shortest times and the most tokens per second of a model, computed from its weights alone.

    Args:
        config: The configuration of a GPT-2, a Llama, a Qwen3, one with experts, or a gpt-oss.
        weights: f32, bf16, or a quantization such as ``int8`` or ``int4-g32``; experts in MXFP4 stay in it.
        rates: The result of ``machine_rates``.
        load: Prompts of the batch, tokens of a prompt, and tokens generated after each.

    Returns:
        The figures by name; empty if the processor has no rate for the weights.
    """
    has_mxfp4 = config.get("quantization_config", {}).get("quant_method") == "mxfp4"
    (size, operations), (expert_size, expert_operations) = (
        (bytes_per_weight(kind), rates[ARITHMETIC.get(kind.partition("-g")[0], "int8")])
        for kind in (weights, "int4-g32" if has_mxfp4 else weights)
    )
    if not operations or not expert_operations:
        return {}
    blocks, head = num_weights(config)
    expert, num_experts, num_chosen = expert_weights(config)
    num_prompts, input_len, output_len = load

    def step(rows: int, heads: int) -> float:
        read = size * (blocks + head) + expert_size * expert * min(num_experts, rows * num_chosen)
        multiplied = (rows * blocks + heads * head) / operations + rows * expert * num_chosen / expert_operations
        return max(read / rates["bytes_read"], 2 * multiplied)

    ceilings = {"ms_per_token": 1e3 * step(1, 1), "prefill_ms": 1e3 * step(input_len, 1)}
    if num_prompts:
        whole = step(num_prompts * input_len, num_prompts) + (output_len - 1) * step(num_prompts, num_prompts)
        ceilings["tokens_per_second"] = num_prompts * output_len / whole
    return ceilings


def bytes_per_weight(kind: str) -> float:
    """With its share of a group's scale."""
    name, _, group = kind.partition("-g")
    return BYTES[name] + (SCALE_BYTES / int(group) if group else 0.0)


def num_weights(config: Mapping[str, Any]) -> tuple[int, int]:
    """The number of weights in the dense layers of all blocks, without experts, and in the head."""
    if config["model_type"] == "gpt2":
        width = config["n_embd"]
        inner = config.get("n_inner") or 4 * width
        return config["n_layer"] * (4 * width * width + 2 * width * inner), config["vocab_size"] * width
    width = config["hidden_size"]
    heads, kv_heads, head_dim = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    attention = width * head_dim * (2 * heads + 2 * kv_heads)
    num_experts = num_experts_of(config)
    mlp = width * num_experts if num_experts else 3 * width * config["intermediate_size"]
    return config["num_hidden_layers"] * (attention + mlp), config["vocab_size"] * width


def expert_weights(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """The number of weights in an expert of all blocks; how many experts a block has, and how many a token has."""
    num_experts = num_experts_of(config)
    if not num_experts:
        return 0, 0, 0
    size = 3 * config["hidden_size"] * config.get("moe_intermediate_size", config["intermediate_size"])
    return config["num_hidden_layers"] * size, num_experts, config["num_experts_per_tok"]


def num_experts_of(config: Mapping[str, Any]) -> int:
    """Experts of a block; 0: it has a plain MLP."""
    count: int = config.get("num_experts", config.get("num_local_experts", 0))
    return count
