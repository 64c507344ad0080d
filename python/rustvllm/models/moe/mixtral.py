"""Mixtral: Mistral's attention, and in each layer experts of which a router chooses a few for each token."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from rustvllm.layers.router import Routing
from rustvllm.models.decoder.expert_mlp import ExpertMLP, ExpertSizes
from rustvllm.models.decoder.rotary_attention import HeadSizes, RotaryAttention
from rustvllm.models.decoder.rotary_lm import PreNormLayer, RotaryLM
from rustvllm.models.hf_config import HFConfig

_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
"""What checkpoints call the maps of an expert, and what they are called here."""
_EXPERT = re.compile(r"(\.mlp\.experts\.\d+\.)(w[123])\.")
_DEFAULT_EXPERTS = 8, 2


class MixtralForCausalLM(RotaryLM):
    """``MixtralForCausalLM`` of a checkpoint."""

    def __init__(self, hf_config: Mapping[str, Any], max_model_len: int) -> None:
        """See ``CausalLM.__init__``; without a ``rope_theta`` it is a million."""
        super().__init__({"rope_theta": 1e6, **hf_config}, max_model_len)

    def layer_maker(self, config: HFConfig, sizes: HeadSizes, num_layers: int) -> Callable[[int], PreNormLayer]:
        """If there is a window, every layer has it; the weights of a token's experts add up to 1."""
        del num_layers
        eps = config.positive_float("rms_norm_eps", 1e-5)
        experts = ExpertSizes.from_config(
            config, sizes.hidden_size, inner="intermediate_size", experts=_DEFAULT_EXPERTS
        )
        act, window = config.string("hidden_act", "silu"), config.sliding_window()
        return lambda _: PreNormLayer(
            eps, RotaryAttention(sizes, sliding_window=window), ExpertMLP(experts, act, Routing(is_normed=True))
        )

    def checkpoint_name(self, name: str) -> str:
        """See ``CausalLM.checkpoint_name``: the names of the other mixture of experts."""
        renamed = name.replace(".block_sparse_moe.", ".mlp.")
        return _EXPERT.sub(lambda match: f"{match[1]}{_PARTS[match[2]]}.", renamed)
