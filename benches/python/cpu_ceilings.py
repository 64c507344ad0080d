"""Limits of a processor: ``machine_rates`` measures them, ``model_ceilings`` says what a model could reach."""

import time
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from rustvllm import _core

READ_OUTPUTS, READ_INPUTS = 49_152, 2048
"""The weight that is read: 384 MiB, which no cache holds."""
PACKED_TOGETHER = 4096
NUM_READINGS = 5
ARITHMETIC: Mapping[str, Literal["f32", "bf16", "int8"]] = {"f32": "f32", "bf16": "bf16"}
"""What weights of a kind are multiplied in; those of 8 and 4 bits as whole numbers of 8."""
BYTES = {"f32": 4.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5}


def machine_rates(num_threads: int) -> dict[str, float]:
    """Bytes per second that threads read, asking ahead, and operations per second from registers; 0: none."""
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
    """The least times and the most tokens per second of a model, from its weights alone.

    Args:
        config: Of a GPT-2, a Llama or a Qwen3.
        weights: f32, bf16, or a quantisation: ``int8``, ``int4-g32`` and so on.
        rates: As ``machine_rates`` gives them.
        load: Prompts of the batch, tokens of a prompt, and tokens drawn after each.

    Returns:
        By the names of the figures. Without those of which the processor has no rate.
    """
    name, _, group = weights.partition("-g")
    operations = rates[ARITHMETIC.get(name, "int8")]
    if not operations:
        return {}
    blocks, head = num_weights(config)
    # A scale of a group takes 4 bytes in 8 bits and 2 in 4.
    scale = 0.0 if not group else {"int8": 4, "int4": 2}[name] / int(group)
    num_bytes = (blocks + head) * (BYTES[name] + scale)
    num_prompts, input_len, output_len = load

    def step(rows: int, heads: int) -> float:
        return max(num_bytes / rates["bytes_read"], 2 * (rows * blocks + heads * head) / operations)

    ceilings = {"ms_per_token": 1e3 * step(1, 1), "prefill_ms": 1e3 * step(input_len, 1)}
    if num_prompts:
        whole = step(num_prompts * input_len, num_prompts) + (output_len - 1) * step(num_prompts, num_prompts)
        ceilings["tokens_per_second"] = num_prompts * output_len / whole
    return ceilings


def num_weights(config: Mapping[str, Any]) -> tuple[int, int]:
    """Weights of the dense layers of all blocks, and of the head."""
    if config["model_type"] == "gpt2":
        width = config["n_embd"]
        inner = config.get("n_inner") or 4 * width
        return config["n_layer"] * (4 * width * width + 2 * width * inner), config["vocab_size"] * width
    width = config["hidden_size"]
    heads, kv_heads, head_dim = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    attention = width * head_dim * (2 * heads + 2 * kv_heads)
    return (
        config["num_hidden_layers"] * (attention + 3 * width * config["intermediate_size"]),
        config["vocab_size"] * width,
    )
