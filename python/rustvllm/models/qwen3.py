"""Qwen3: Llama's structure with norms on query and key heads, whose size is independent of the stream's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rustvllm.config.architectures import HEAD_DIMS
from rustvllm.layers.norm import RMSNorm
from rustvllm.models.decoder.gated_mlp import GatedMLP
from rustvllm.models.decoder.rotary_attention import HeadSizes, RotaryAttention
from rustvllm.models.decoder.rotary_lm import PreNormLayer, RotaryLM
from rustvllm.models.hf_config import HFConfig
from rustvllm.models.qwen2 import qwen_windows


def qwen3_attention(config: HFConfig, sizes: HeadSizes, eps: float) -> Callable[[int | None], RotaryAttention]:
    """What makes the attention of a layer with a window of so many tokens (None: it sees all)."""
    bias = config.boolean("attention_bias", default=False)
    return lambda window: RotaryAttention(
        sizes,
        qkv_bias=bias,
        out_bias=bias,
        sliding_window=window,
        head_norm=partial(RMSNorm, sizes.head_dim, eps),
    )


class Qwen3ForCausalLM(RotaryLM):
    """``Qwen3ForCausalLM`` of a checkpoint."""

    default_head_dim = HEAD_DIMS["Qwen3ForCausalLM"]

    def layer_maker(self, config: HFConfig, sizes: HeadSizes, num_layers: int) -> Callable[[int], PreNormLayer]:
        """Layers with windows by Qwen2's rule."""
        eps = config.positive_float("rms_norm_eps", 1e-6)
        make_attention = qwen3_attention(config, sizes, eps)
        inner_size, act = config.positive_int("intermediate_size"), config.string("hidden_act", "silu")
        windows = qwen_windows(config, num_layers)
        return lambda layer: PreNormLayer(
            eps, make_attention(windows[layer]), GatedMLP(sizes.hidden_size, inner_size, act)
        )
