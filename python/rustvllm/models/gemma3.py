"""Gemma 3, the text model: Gemma 2's layers with norms on queries and keys, and two rotary bases.

Five layers in six have a short sliding window and a small rotary base; the sixth sees all keys and has a large base.
Of checkpoints that see images, ``models.vision.tower`` has the part that sees. The tokens of an image see each other,
which ``AttentionMetadata.visible`` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rustvllm.config.architectures import HEAD_DIMS
from rustvllm.layers.rotary import RotaryEmbedding
from rustvllm.models.decoder.gemma_lm import GemmaLM, gemma_attention
from rustvllm.models.decoder.rotary_attention import HeadSizes, RotaryAttention
from rustvllm.models.hf_config import FULL_ATTENTION, SLIDING_ATTENTION, HFConfig

_BASES = {FULL_ATTENTION: ("rope_theta", 1_000_000.0), SLIDING_ATTENTION: ("rope_local_base_freq", 10_000.0)}
"""For each type of layer: the key of its rotary base in older configurations, and the default value."""


class Gemma3ForCausalLM(GemmaLM):
    """``Gemma3ForCausalLM`` of a checkpoint."""

    default_head_dim = HEAD_DIMS["Gemma3ForCausalLM"]

    def make_layer_types(self, config: HFConfig, num_layers: int) -> list[str]:
        """See ``GemmaLM.make_layer_types``."""
        config.refuse_unless("attn_logit_softcapping", supported=None)
        pattern = config.positive_int("sliding_window_pattern", default=6)
        return config.layer_types(
            num_layers, lambda layer: SLIDING_ATTENTION if (layer + 1) % pattern else FULL_ATTENTION
        )

    def make_attention(self, config: HFConfig, sizes: HeadSizes, window: int | None, eps: float) -> RotaryAttention:
        """See ``GemmaLM.make_attention``."""
        return gemma_attention(config, sizes, window, head_norm_eps=eps)

    def make_rotary(
        self, hf_config: Mapping[str, Any], head_dim: int, max_model_len: int
    ) -> Mapping[str, RotaryEmbedding]:
        """See ``GemmaLM.make_rotary``: one for each kind of layer."""
        return {
            kind: RotaryEmbedding.from_config(_rope_of(hf_config, kind), head_dim, max_model_len, layer_type=kind)
            for kind in dict.fromkeys(self.layer_types)
        }


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The text model of a ``Gemma3ForConditionalGeneration`` checkpoint."""

    prefixes = ("language_model.model.", "model.language_model.", "language_model.", "model.")

    def is_ignored(self, name: str) -> bool:
        """Whether the tensor belongs to the vision part."""
        return name.startswith(("vision_tower.", "multi_modal_projector."))


def _rope_of(hf_config: Mapping[str, Any], layer_type: str) -> dict[str, Any]:
    """The configuration for the rotary positions of one type of layer.

    Older configurations have a base for each type, and a ``rope_scaling`` for full attention only.
    """
    config = dict(hf_config)
    name, default = _BASES[layer_type]
    config["rope_theta"] = default if hf_config.get(name) is None else hf_config[name]
    if layer_type == SLIDING_ATTENTION:
        config["rope_scaling"] = None
    return config
