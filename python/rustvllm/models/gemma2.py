"""Gemma 2: norms around attention and MLP, soft caps on scores and logits, a window in every other layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rustvllm.architectures import HEAD_DIMS
from rustvllm.attention.backend import AttentionPlan
from rustvllm.attention.metadata import KVCacheSpec
from rustvllm.layers.linear import Embedding, Linear
from rustvllm.layers.norm import GemmaRMSNorm
from rustvllm.layers.rotary import RotaryEmbedding
from rustvllm.models.gated_mlp import GatedMLP
from rustvllm.models.hf_config import FULL_ATTENTION, SLIDING_ATTENTION, HFConfig
from rustvllm.models.interface import CausalLM
from rustvllm.models.rotary_attention import HeadSizes, RotaryAttention


class GemmaLayer(nn.Module):
    """Attention and MLP, each normed before and after, and added to the stream."""

    def __init__(self, eps: float, self_attn: RotaryAttention, mlp: GatedMLP) -> None:
        super().__init__()
        hidden_size = self_attn.sizes.hidden_size
        self.input_layernorm = GemmaRMSNorm(hidden_size, eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = GemmaRMSNorm(hidden_size, eps)
        self.pre_feedforward_layernorm = GemmaRMSNorm(hidden_size, eps)
        self.mlp = mlp
        self.post_feedforward_layernorm = GemmaRMSNorm(hidden_size, eps)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, attention: AttentionPlan) -> Tensor:
        attended = self.self_attn(self.input_layernorm(hidden), cos, sin, kv_cache, attention)
        hidden = hidden + self.post_attention_layernorm(attended)
        out: Tensor = hidden + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden)))
        return out


class Gemma2ForCausalLM(CausalLM):
    """``Gemma2ForCausalLM`` of a checkpoint."""

    prefixes = ("model.",)
    embed_tokens_name = "embed_tokens.weight"

    def __init__(self, hf_config: Mapping[str, Any], max_model_len: int) -> None:
        """See ``CausalLM.__init__``."""
        super().__init__(hf_config, max_model_len)
        config = HFConfig(hf_config)
        config.refuse_unless("quantization_config", supported=None)
        config.refuse_unless("use_bidirectional_attention", supported=False)
        sizes = HeadSizes.from_config(config, head_dim=HEAD_DIMS["Gemma2ForCausalLM"])
        num_layers = config.positive_int("num_hidden_layers")
        eps = config.positive_float("rms_norm_eps", 1e-6)
        self.vocab_size = config.positive_int("vocab_size")
        self.max_positions = None  # rotary angles exist for every position
        self.kv_cache_spec = KVCacheSpec(num_layers, sizes.num_kv_heads, sizes.head_dim)
        self.logit_cap = config.optional_positive_float("final_logit_softcapping", 30.0)

        self.embed_tokens = Embedding(self.vocab_size, sizes.hidden_size)
        self.embed_scale = embedding_scale(sizes.hidden_size)
        soft_cap = config.optional_positive_float("attn_logit_softcapping", 50.0)
        types = config.layer_types(num_layers, lambda layer: FULL_ATTENTION if layer % 2 else SLIDING_ATTENTION)
        self.layers = nn.ModuleList(
            GemmaLayer(eps, gemma_attention(config, sizes, window, soft_cap=soft_cap), gemma_mlp(config, sizes))
            for window in config.windows(types, default=4096)
        )
        self.norm = GemmaRMSNorm(sizes.hidden_size, eps)
        self.rotary = RotaryEmbedding.from_config(hf_config, sizes.head_dim, max_model_len)
        tied = config.boolean("tie_word_embeddings", default=True)
        self.lm_head = None if tied else Linear(sizes.hidden_size, self.vocab_size, bias=False)

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: Sequence[Tensor], attention: AttentionPlan
    ) -> Tensor:
        """See ``CausalLM.forward``."""
        hidden = self.embed_tokens(input_ids) * self.embed_scale
        cos, sin = self.rotary.cos_sin(positions, hidden.dtype)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            hidden = layer(hidden, cos, sin, kv_cache, attention)
        normed: Tensor = self.norm(hidden)
        return normed

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See ``CausalLM.compute_logits``; the logits are capped softly."""
        return cap_logits(super().compute_logits(hidden), self.logit_cap)


def gemma_attention(
    config: HFConfig,
    sizes: HeadSizes,
    window: int | None,
    *,
    soft_cap: float | None = None,
    head_norm_eps: float | None = None,
) -> RotaryAttention:
    """Attention whose scale follows ``query_pre_attn_scalar``; heads are normed if there is an epsilon for it."""
    bias = config.boolean("attention_bias", default=False)
    return RotaryAttention(
        sizes,
        qkv_bias=bias,
        out_bias=bias,
        scale=config.positive_float("query_pre_attn_scalar", 256.0) ** -0.5,
        sliding_window=window,
        soft_cap=soft_cap,
        head_norm=None if head_norm_eps is None else partial(GemmaRMSNorm, sizes.head_dim, head_norm_eps),
    )


def gemma_mlp(config: HFConfig, sizes: HeadSizes) -> GatedMLP:
    """The gated MLP, with a GELU that the configuration calls ``hidden_activation``."""
    inner_size = config.positive_int("intermediate_size")
    return GatedMLP(sizes.hidden_size, inner_size, config.string("hidden_activation", "gelu_pytorch_tanh"))


def embedding_scale(hidden_size: int) -> float:
    """The root of the width, rounded to the dtype that the model is built in, as it was in training."""
    return float(torch.tensor(hidden_size**0.5, dtype=torch.get_default_dtype(), device="cpu"))


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """``cap · tanh(logits / cap)``, in place."""
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
