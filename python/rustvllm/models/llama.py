"""Llama 2 and 3: rotary positions, RMSNorm, grouped-query attention, gated MLP.

SmolLM3 is the same, but some of its layers do not rotate queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rustvllm.exceptions import ModelLoadError
from rustvllm.models.decoder.gated_mlp import GatedMLP
from rustvllm.models.decoder.rotary_attention import HeadSizes, RotaryAttention
from rustvllm.models.decoder.rotary_lm import PreNormLayer, RotaryLM
from rustvllm.models.hf_config import FULL_ATTENTION, SLIDING_ATTENTION, HFConfig


class LlamaForCausalLM(RotaryLM):
    """``LlamaForCausalLM`` of a checkpoint."""

    def layer_maker(self, config: HFConfig, sizes: HeadSizes, num_layers: int) -> Callable[[int], PreNormLayer]:
        """Layers with biases if the configuration has them."""
        eps = self.norm_eps(config)
        attention_bias = config.boolean("attention_bias", default=False)
        mlp_bias = config.boolean("mlp_bias", default=False)
        inner_size, act = config.positive_int("intermediate_size"), config.string("hidden_act", "silu")
        scale, rotates = self.attention_scale(config), self.rotating_layers(config, num_layers)
        windows = self.make_windows(config, num_layers)
        return lambda layer: PreNormLayer(
            eps,
            RotaryAttention(
                sizes,
                qkv_bias=attention_bias,
                out_bias=attention_bias,
                scale=scale,
                sliding_window=windows[layer],
                rotary=0 if rotates[layer] else None,
            ),
            GatedMLP(sizes.hidden_size, inner_size, act, bias=mlp_bias),
        )

    def attention_scale(self, config: HFConfig) -> float | None:  # noqa: ARG002 -- that of all Llamas
        """See ``RotaryAttention``."""
        return None

    def rotating_layers(self, config: HFConfig, num_layers: int) -> list[bool]:  # noqa: ARG002 -- all do
        """For each layer whether it rotates queries and keys."""
        return [True] * num_layers

    def make_windows(self, config: HFConfig, num_layers: int) -> list[int | None]:  # noqa: ARG002 -- there are none
        """How many tokens a query of each layer sees; None: all."""
        return [None] * num_layers


class SmolLM3ForCausalLM(LlamaForCausalLM):
    """``SmolLM3ForCausalLM`` of a checkpoint."""

    default_tied = True

    def __init__(self, hf_config: Mapping[str, Any], max_model_len: int) -> None:
        """See ``CausalLM.__init__``; without a ``rope_theta`` it is two million."""
        super().__init__({"rope_theta": 2e6, **hf_config}, max_model_len)

    def rotating_layers(self, config: HFConfig, num_layers: int) -> list[bool]:
        """From ``no_rope_layers``, which has a 1 for each layer that rotates, else all but every n-th."""
        rotates = config.flags("no_rope_layers", num_layers)
        if rotates is None:
            interval = config.positive_int("no_rope_layer_interval", default=4)
            rotates = [(layer + 1) % interval != 0 for layer in range(num_layers)]
        return rotates

    def make_windows(self, config: HFConfig, num_layers: int) -> list[int | None]:
        """With ``use_sliding_window`` those that ``layer_types`` names have a window, else those that do not rotate."""
        slides, rotates = config.boolean("use_sliding_window", default=False), self.rotating_layers(config, num_layers)
        has_window = slides and config.sliding_window() is not None
        types = config.layer_types(
            num_layers, lambda layer: SLIDING_ATTENTION if has_window and not rotates[layer] else FULL_ATTENTION
        )
        if not slides and SLIDING_ATTENTION in types:
            raise ModelLoadError(
                f"config.json: 'layer_types' has {SLIDING_ATTENTION!r}, but 'use_sliding_window' is not true; set both "
                "or none of them"
            )
        return config.windows(types)
