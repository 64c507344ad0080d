"""Qwen2 and Qwen2.5: Llama's structure with biases on query, key and value, and optional windows in later layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rustvllm.exceptions import ModelLoadError
from rustvllm.models.decoder.gated_mlp import GatedMLP
from rustvllm.models.decoder.rotary_attention import HeadSizes, RotaryAttention
from rustvllm.models.decoder.rotary_lm import PreNormLayer, RotaryLM
from rustvllm.models.hf_config import FULL_ATTENTION, SLIDING_ATTENTION, HFConfig


class Qwen2ForCausalLM(RotaryLM):
    """``Qwen2ForCausalLM`` of a checkpoint."""

    def layer_maker(self, config: HFConfig, sizes: HeadSizes, num_layers: int) -> Callable[[int], PreNormLayer]:
        """Layers without a bias in the output projection."""
        eps = config.positive_float("rms_norm_eps", 1e-6)
        inner_size, act = config.positive_int("intermediate_size"), config.string("hidden_act", "silu")
        windows = qwen_windows(config, num_layers)
        return lambda layer: PreNormLayer(
            eps,
            RotaryAttention(sizes, qkv_bias=True, sliding_window=windows[layer]),
            GatedMLP(sizes.hidden_size, inner_size, act),
        )


def qwen_windows(config: HFConfig, num_layers: int) -> Sequence[int | None]:
    """Each layer's window: only with ``use_sliding_window``, and then from layer ``max_window_layers`` on.

    Newer configurations have a ``layer_types`` list instead.
    """
    slides = config.boolean("use_sliding_window", default=False)
    first = config.index("max_window_layers", default=28)
    has_window = slides and config.sliding_window() is not None
    types = config.layer_types(
        num_layers, lambda layer: SLIDING_ATTENTION if has_window and layer >= first else FULL_ATTENTION
    )
    if not slides and SLIDING_ATTENTION in types:
        raise ModelLoadError(
            f"config.json: 'layer_types' has {SLIDING_ATTENTION!r}, but 'use_sliding_window' is not true; set both or "
            "none of them"
        )
    return config.windows(types)
