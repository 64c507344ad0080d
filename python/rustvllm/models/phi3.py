"""Phi-3: Llama's structure, stored with fused projections; LongRoPE in long models, partly rotated heads in new."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rustvllm.models.decoder.gated_mlp import GatedMLP
from rustvllm.models.decoder.rotary_attention import HeadSizes, RotaryAttention
from rustvllm.models.decoder.rotary_lm import PreNormLayer, RotaryLM
from rustvllm.models.hf_config import HFConfig

_TRAINED_LENGTH = 4096
"""``original_max_position_embeddings`` if a configuration lacks it."""


class Phi3ForCausalLM(RotaryLM):
    """``Phi3ForCausalLM`` of a checkpoint."""

    partial_rotary = True

    def __init__(self, hf_config: Mapping[str, Any], max_model_len: int) -> None:
        """See ``CausalLM.__init__``."""
        super().__init__(_with_longrope(hf_config), max_model_len)

    def layer_maker(self, config: HFConfig, sizes: HeadSizes, num_layers: int) -> Callable[[int], PreNormLayer]:  # noqa: ARG002 -- layers are alike
        """If there is a window, every layer has it."""
        eps = config.positive_float("rms_norm_eps", 1e-5)
        inner_size, act = config.positive_int("intermediate_size"), config.string("hidden_act", "silu")
        window = config.sliding_window()
        return lambda _: PreNormLayer(
            eps,
            RotaryAttention(sizes, sliding_window=window, stored_fused=True),
            GatedMLP(sizes.hidden_size, inner_size, act, stored_fused=True),
        )


def _with_longrope(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with LongRoPE's later name, because the first checkpoints call it ``su`` or ``yarn``."""
    config = dict(hf_config)
    config.setdefault("original_max_position_embeddings", _TRAINED_LENGTH)
    for key in ("rope_parameters", "rope_scaling"):
        scaling = config.get(key)
        if isinstance(scaling, Mapping) and (scaling.get("rope_type") or scaling.get("type")) in ("su", "yarn"):
            config[key] = {**scaling, "rope_type": "longrope"}
    return config
