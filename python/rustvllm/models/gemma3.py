"""Gemma 3, the text model: Gemma 2's layers with norms on queries and keys, and two rotary bases.

Five layers in six slide, by a short window, and turn by a small base; the sixth sees everything and turns by a large
one. Checkpoints with a vision tower are served for text: the tower is not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from rustvllm.architectures import HEAD_DIMS
from rustvllm.attention.backend import AttentionPlan
from rustvllm.attention.metadata import KVCacheSpec
from rustvllm.layers.linear import Embedding, Linear
from rustvllm.layers.norm import GemmaRMSNorm
from rustvllm.layers.rotary import RotaryEmbedding
from rustvllm.models.gemma2 import GemmaLayer, cap_logits, embedding_scale, gemma_attention, gemma_mlp
from rustvllm.models.hf_config import FULL_ATTENTION, SLIDING_ATTENTION, HFConfig
from rustvllm.models.interface import CausalLM
from rustvllm.models.rotary_attention import HeadSizes

_BASES = {FULL_ATTENTION: ("rope_theta", 1_000_000.0), SLIDING_ATTENTION: ("rope_local_base_freq", 10_000.0)}
"""Per type of layer: where older configurations have its rotary base, and what it is where none says."""


class Gemma3ForCausalLM(CausalLM):
    """``Gemma3ForCausalLM`` of a checkpoint."""

    prefixes: tuple[str, ...] = ("model.",)
    embed_tokens_name = "embed_tokens.weight"

    def __init__(self, hf_config: Mapping[str, Any], max_model_len: int) -> None:
        """See ``CausalLM.__init__``."""
        super().__init__(hf_config, max_model_len)
        config = HFConfig(hf_config)
        config.refuse_unless("quantization_config", supported=None)
        config.refuse_unless("use_bidirectional_attention", supported=False)
        config.refuse_unless("attn_logit_softcapping", supported=None)
        sizes = HeadSizes.from_config(config, head_dim=HEAD_DIMS["Gemma3ForCausalLM"])
        num_layers = config.positive_int("num_hidden_layers")
        eps = config.positive_float("rms_norm_eps", 1e-6)
        self.vocab_size = config.positive_int("vocab_size")
        self.max_positions = None  # rotary angles exist for every position
        self.kv_cache_spec = KVCacheSpec(num_layers, sizes.num_kv_heads, sizes.head_dim)
        self.logit_cap = config.optional_positive_float("final_logit_softcapping")

        self.embed_tokens = Embedding(self.vocab_size, sizes.hidden_size)
        self.embed_scale = embedding_scale(sizes.hidden_size)
        pattern = config.positive_int("sliding_window_pattern", default=6)
        self.layer_types = config.layer_types(
            num_layers, lambda layer: SLIDING_ATTENTION if (layer + 1) % pattern else FULL_ATTENTION
        )
        self.layers = nn.ModuleList(
            GemmaLayer(eps, gemma_attention(config, sizes, window, head_norm_eps=eps), gemma_mlp(config, sizes))
            for window in config.windows(self.layer_types, default=4096)
        )
        self.norm = GemmaRMSNorm(sizes.hidden_size, eps)
        self.rotary = {
            layer_type: RotaryEmbedding.from_config(
                _rope_of(hf_config, layer_type), sizes.head_dim, max_model_len, layer_type=layer_type
            )
            for layer_type in dict.fromkeys(self.layer_types)
        }
        tied = config.boolean("tie_word_embeddings", default=True)
        self.lm_head = None if tied else Linear(sizes.hidden_size, self.vocab_size, bias=False)

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: Sequence[Tensor], attention: AttentionPlan
    ) -> Tensor:
        """See ``CausalLM.forward``."""
        hidden = self.embed_tokens(input_ids) * self.embed_scale
        cos_sin = {kind: rotary.cos_sin(positions, hidden.dtype) for kind, rotary in self.rotary.items()}
        for layer, layer_type, kv_cache in zip(self.layers, self.layer_types, kv_caches, strict=True):
            hidden = layer(hidden, *cos_sin[layer_type], kv_cache, attention)
        normed: Tensor = self.norm(hidden)
        return normed

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See ``CausalLM.compute_logits``; the logits are capped softly where the configuration asks for it."""
        return cap_logits(super().compute_logits(hidden), self.logit_cap)


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The text model of a ``Gemma3ForConditionalGeneration`` checkpoint."""

    prefixes = ("language_model.model.", "model.language_model.", "language_model.", "model.")

    def is_ignored(self, name: str) -> bool:
        """What looks at pictures."""
        return name.startswith(("vision_tower.", "multi_modal_projector."))


def _rope_of(hf_config: Mapping[str, Any], layer_type: str) -> dict[str, Any]:
    """The configuration as the rotary positions of one type of layer read it.

    Older configurations have a base per type and a ``rope_scaling`` that is meant for full attention alone.
    """
    config = dict(hf_config)
    name, default = _BASES[layer_type]
    config["rope_theta"] = default if hf_config.get(name) is None else hf_config[name]
    if layer_type == SLIDING_ATTENTION:
        config["rope_scaling"] = None
    return config
