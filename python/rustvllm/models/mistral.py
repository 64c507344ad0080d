"""Mistral: Llama's structure without biases, with a sliding window if the configuration has one."""

from __future__ import annotations

from collections.abc import Callable

from rustvllm.models.decoder.gated_mlp import GatedMLP
from rustvllm.models.decoder.rotary_attention import HeadSizes, RotaryAttention
from rustvllm.models.decoder.rotary_lm import PreNormLayer, RotaryLM
from rustvllm.models.hf_config import FULL_ATTENTION, SLIDING_ATTENTION, HFConfig


class MistralForCausalLM(RotaryLM):
    """``MistralForCausalLM`` of a checkpoint."""

    def layer_maker(self, config: HFConfig, sizes: HeadSizes, num_layers: int) -> Callable[[int], PreNormLayer]:
        """If there is a window, every layer has it, unless ``layer_types`` says otherwise."""
        eps = config.positive_float("rms_norm_eps", 1e-6)
        inner_size, act = config.positive_int("intermediate_size"), config.string("hidden_act", "silu")
        has_window = config.sliding_window() is not None
        types = config.layer_types(num_layers, lambda _: SLIDING_ATTENTION if has_window else FULL_ATTENTION)
        windows = config.windows(types)
        return lambda layer: PreNormLayer(
            eps, RotaryAttention(sizes, sliding_window=windows[layer]), GatedMLP(sizes.hidden_size, inner_size, act)
        )
