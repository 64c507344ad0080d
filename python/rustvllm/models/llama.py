"""Llama: rotary positions, RMSNorm, grouped-query attention, gated MLP."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from rustvllm.attention.backend import AttentionPlan
from rustvllm.attention.metadata import KVCacheSpec
from rustvllm.exceptions import ModelLoadError
from rustvllm.layers.activation import get_activation
from rustvllm.layers.linear import Embedding, Linear
from rustvllm.layers.norm import RMSNorm
from rustvllm.layers.rotary import RotaryEmbedding, apply_rotary
from rustvllm.models.hf_config import HFConfig
from rustvllm.models.interface import CausalLM

_INV_FREQ = re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


class LlamaAttention(nn.Module):
    """Grouped-query attention with query, key and value in one projection."""

    def __init__(self, config: HFConfig, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.splits = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
        self.scale = head_dim**-0.5
        bias = config.boolean("attention_bias", default=False)
        self.qkv_proj = Linear(hidden_size, sum(self.splits), bias=bias)
        self.o_proj = Linear(num_heads * head_dim, hidden_size, bias=bias)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, attention: AttentionPlan) -> Tensor:
        qkv = self.qkv_proj(hidden).unflatten(-1, (-1, self.head_dim))  # [T, H + KVH + KVH, D]
        num_heads, num_kv_heads = self.num_heads, self.num_kv_heads
        turned = apply_rotary(qkv[:, : num_heads + num_kv_heads], cos, sin)
        query, key, value = turned[:, :num_heads], turned[:, num_heads:], qkv[:, -num_kv_heads:]
        out = attention.forward(query, key, value, kv_cache, self.scale)
        projected: Tensor = self.o_proj(out.flatten(1))
        return projected

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        return _parts(self.qkv_proj, ("q_proj", "k_proj", "v_proj"), self.splits) | _parts(self.o_proj, ("o_proj",))


class LlamaMLP(nn.Module):
    def __init__(self, config: HFConfig, hidden_size: int) -> None:
        super().__init__()
        inner_size = config.positive_int("intermediate_size")
        bias = config.boolean("mlp_bias", default=False)
        self.gate_up_proj = Linear(hidden_size, 2 * inner_size, bias=bias)
        self.act = get_activation(config.string("hidden_act", "silu"))
        self.down_proj = Linear(inner_size, hidden_size, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        out: Tensor = self.down_proj(self.act(gate) * up)
        return out

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        inner_size = self.down_proj.weight.shape[1]
        gate_up = _parts(self.gate_up_proj, ("gate_proj", "up_proj"), (inner_size, inner_size))
        return gate_up | _parts(self.down_proj, ("down_proj",))


class LlamaDecoderLayer(nn.Module):
    def __init__(self, config: HFConfig, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        eps = config.positive_float("rms_norm_eps", 1e-6)
        self.input_layernorm = RMSNorm(hidden_size, eps)
        self.self_attn = LlamaAttention(config, hidden_size, num_heads, num_kv_heads, head_dim)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps)
        self.mlp = LlamaMLP(config, hidden_size)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, attention: AttentionPlan) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, kv_cache, attention)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        return {
            "input_layernorm.weight": self.input_layernorm.weight,
            "post_attention_layernorm.weight": self.post_attention_layernorm.weight,
            **{f"self_attn.{name}": tensor for name, tensor in self.self_attn.checkpoint_tensors().items()},
            **{f"mlp.{name}": tensor for name, tensor in self.mlp.checkpoint_tensors().items()},
        }


class LlamaForCausalLM(CausalLM):
    """``LlamaForCausalLM`` of a checkpoint."""

    prefixes = ("model.",)
    embed_tokens_name = "embed_tokens.weight"

    def __init__(self, hf_config: Mapping[str, Any], max_model_len: int) -> None:
        """See ``CausalLM.__init__``."""
        super().__init__(hf_config, max_model_len)
        config = HFConfig(hf_config)
        config.refuse_unless("quantization_config", supported=None)
        hidden_size = config.positive_int("hidden_size")
        num_layers = config.positive_int("num_hidden_layers")
        num_heads = config.positive_int("num_attention_heads")
        num_kv_heads = config.positive_int("num_key_value_heads", default=num_heads)
        if num_heads % num_kv_heads:
            raise ModelLoadError(
                f"config.json: num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads "
                f"({num_kv_heads})"
            )
        head_dim = config.positive_int("head_dim", default=hidden_size // num_heads)
        if head_dim % 2:
            raise ModelLoadError(f"config.json: head_dim must be even for rotary positions, got {head_dim}")
        self.vocab_size = config.positive_int("vocab_size")
        self.max_positions = None  # rotary angles exist for every position
        self.kv_cache_spec = KVCacheSpec(num_layers, num_kv_heads, head_dim)

        self.embed_tokens = Embedding(self.vocab_size, hidden_size)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, hidden_size, num_heads, num_kv_heads, head_dim) for _ in range(num_layers)
        )
        self.norm = RMSNorm(hidden_size, config.positive_float("rms_norm_eps", 1e-6))
        self.rotary = RotaryEmbedding.from_config(hf_config, head_dim, max_model_len)
        tied = config.boolean("tie_word_embeddings", default=False)
        self.lm_head = None if tied else Linear(hidden_size, self.vocab_size, bias=False)

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: Sequence[Tensor], attention: AttentionPlan
    ) -> Tensor:
        """See ``CausalLM.forward``."""
        hidden = self.embed_tokens(input_ids)
        cos, sin = self.rotary.cos_sin(positions, hidden.dtype)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            hidden = layer(hidden, cos, sin, kv_cache, attention)
        normed: Tensor = self.norm(hidden)
        return normed

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """See ``CausalLM.checkpoint_tensors``: fused maps are stored in parts."""
        tensors: dict[str, Tensor] = {self.embed_tokens_name: self.embed_tokens.weight, "norm.weight": self.norm.weight}
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, LlamaDecoderLayer)
            tensors |= {f"layers.{index}.{name}": tensor for name, tensor in layer.checkpoint_tensors().items()}
        return tensors

    def is_ignored(self, name: str) -> bool:
        """The rotary frequencies that older checkpoints carry along: they follow from the configuration."""
        return _INV_FREQ.fullmatch(name) is not None


def _parts(linear: Linear, names: tuple[str, ...], sizes: tuple[int, ...] | None = None) -> dict[str, Tensor]:
    """The rows of a fused map under the names of the maps it is made of."""
    sizes = sizes or (linear.weight.shape[0],)
    tensors = {f"{name}.weight": part for name, part in zip(names, linear.weight.split_with_sizes(sizes), strict=True)}
    if linear.bias is not None:
        tensors |= {f"{name}.bias": part for name, part in zip(names, linear.bias.split_with_sizes(sizes), strict=True)}
    return tensors
