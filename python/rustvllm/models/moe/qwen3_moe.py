"""Qwen3's mixture of experts: Qwen3's attention, and experts in all layers or in some of them."""

from __future__ import annotations

from collections.abc import Callable

from rustvllm.models.decoder.rotary_attention import HeadSizes
from rustvllm.models.decoder.rotary_lm import PreNormLayer, RotaryLM
from rustvllm.models.hf_config import HFConfig
from rustvllm.models.moe.qwen2_moe import qwen_mlps
from rustvllm.models.qwen3 import qwen3_attention


class Qwen3MoeForCausalLM(RotaryLM):
    """``Qwen3MoeForCausalLM`` of a checkpoint."""

    def layer_maker(self, config: HFConfig, sizes: HeadSizes, num_layers: int) -> Callable[[int], PreNormLayer]:
        """If there is a window, every layer has it; see ``qwen_mlps`` for the layers with experts."""
        eps = config.positive_float("rms_norm_eps", 1e-6)
        make_attention = qwen3_attention(config, sizes, eps)
        slides = config.boolean("use_sliding_window", default=False)
        window = config.sliding_window(4096) if slides else None
        make_mlp = qwen_mlps(config, sizes, num_layers)
        return lambda layer: PreNormLayer(eps, make_attention(window), make_mlp(layer))
