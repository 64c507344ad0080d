"""Llama 2 and 3: rotary positions, RMSNorm, grouped-query attention, gated MLP."""

from __future__ import annotations

from collections.abc import Callable

from rustvllm.models.decoder.gated_mlp import GatedMLP
from rustvllm.models.decoder.rotary_attention import HeadSizes, RotaryAttention
from rustvllm.models.decoder.rotary_lm import PreNormLayer, RotaryLM
from rustvllm.models.hf_config import HFConfig


class LlamaForCausalLM(RotaryLM):
    """``LlamaForCausalLM`` of a checkpoint."""

    def layer_maker(self, config: HFConfig, sizes: HeadSizes, num_layers: int) -> Callable[[int], PreNormLayer]:  # noqa: ARG002 -- layers are alike
        """Layers with biases if the configuration has them."""
        eps = config.positive_float("rms_norm_eps", 1e-6)
        attention_bias = config.boolean("attention_bias", default=False)
        mlp_bias = config.boolean("mlp_bias", default=False)
        inner_size, act = config.positive_int("intermediate_size"), config.string("hidden_act", "silu")
        return lambda _: PreNormLayer(
            eps,
            RotaryAttention(sizes, qkv_bias=attention_bias, out_bias=attention_bias),
            GatedMLP(sizes.hidden_size, inner_size, act, bias=mlp_bias),
        )
