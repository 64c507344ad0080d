"""Gemma 2: norms around attention and MLP, soft caps on scores and logits, a window in every second layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rustvllm.config.architectures import HEAD_DIMS
from rustvllm.layers.rotary import RotaryEmbedding
from rustvllm.models.decoder.gemma_lm import GemmaLM, gemma_attention
from rustvllm.models.decoder.rotary_attention import HeadSizes, RotaryAttention
from rustvllm.models.hf_config import FULL_ATTENTION, SLIDING_ATTENTION, HFConfig


class Gemma2ForCausalLM(GemmaLM):
    """``Gemma2ForCausalLM`` of a checkpoint."""

    default_head_dim = HEAD_DIMS["Gemma2ForCausalLM"]
    default_logit_cap = 30.0

    def make_layer_types(self, config: HFConfig, num_layers: int) -> list[str]:
        """See ``GemmaLM.make_layer_types``."""
        return config.layer_types(num_layers, lambda layer: FULL_ATTENTION if layer % 2 else SLIDING_ATTENTION)

    def make_attention(self, config: HFConfig, sizes: HeadSizes, window: int | None, eps: float) -> RotaryAttention:  # noqa: ARG002 -- heads are not normed
        """See ``GemmaLM.make_attention``."""
        soft_cap = config.optional_positive_float("attn_logit_softcapping", 50.0)
        return gemma_attention(config, sizes, window, soft_cap=soft_cap)

    def make_rotary(
        self, hf_config: Mapping[str, Any], head_dim: int, max_model_len: int
    ) -> Mapping[str, RotaryEmbedding]:
        """See ``GemmaLM.make_rotary``: all layers share one."""
        return dict.fromkeys(self.layer_types, RotaryEmbedding.from_config(hf_config, head_dim, max_model_len))
