"""GPT-NeoX, including Pythia: parallel attention and MLP, partly rotated heads, a projection fused head by head."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from rustvllm.attention.backend import AttentionPlan, rotary_plan
from rustvllm.attention.metadata import KVCacheSpec
from rustvllm.layers.activation import get_activation
from rustvllm.layers.decoder import DenseMLPParts, PreNormBlock, PreNormDecoder
from rustvllm.layers.norm import LayerNorm, linear_add_norm
from rustvllm.layers.parallel import RowLinear, StageLayers, column_linear, head_parts
from rustvllm.layers.rotary import RotaryAngles, RotaryEmbedding, apply_rotary
from rustvllm.models.hf_config import HFConfig
from rustvllm.models.interface import CausalLM

_DERIVED = re.compile(r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)")


class GPTNeoXAttention(nn.Module):
    """Multi-head attention; the rows of the projection are query, key and value of one head after the other."""

    def __init__(self, hidden_size: int, num_heads: int, *, bias: bool) -> None:
        super().__init__()
        self.num_heads = head_parts(num_heads, num_heads)[0].count
        self.head_dim = hidden_size // num_heads
        self.scale = self.head_dim**-0.5
        self.query_key_value = column_linear(hidden_size, 3 * hidden_size, bias=bias)
        self.dense = RowLinear(hidden_size, hidden_size, bias=bias)

    def forward(self, hidden: Tensor, angles: RotaryAngles, kv_cache: Tensor, attention: AttentionPlan) -> Tensor:
        """The heads side by side; the layer applies ``dense``."""
        qkv = self.query_key_value(hidden).view(-1, 3 * self.num_heads, self.head_dim)
        plan, table = rotary_plan(attention), angles.table
        if plan is not None and table is not None:
            out = plan.forward_rotary(
                qkv, self.num_heads, angles.positions, table, kv_cache, self.scale, is_by_head=True
            )
            return out.flatten(1)
        qkv = qkv.unflatten(1, (self.num_heads, 3))
        qkv = qkv.transpose(1, 2).flatten(1, 2)  # [T, 3 H, D], a copy: backends need a token's heads side by side
        turned = apply_rotary(qkv[:, : 2 * self.num_heads], *angles.cos_sin)
        query, key, value = turned[:, : self.num_heads], turned[:, self.num_heads :], qkv[:, 2 * self.num_heads :]
        return attention.forward(query, key, value, kv_cache, self.scale).flatten(1)


class GPTNeoXMLP(nn.Module):
    def __init__(self, config: HFConfig, hidden_size: int) -> None:
        super().__init__()
        inner_size = config.positive_int("intermediate_size")
        self.dense_h_to_4h = column_linear(hidden_size, inner_size, bias=True)
        self.act = get_activation(config.string("hidden_act", "gelu"))
        self.dense_4h_to_h = RowLinear(inner_size, hidden_size, bias=True)

    def forward(self, hidden: Tensor) -> Tensor:
        """The features; the layer applies ``dense_4h_to_h``."""
        inner: Tensor = self.dense_h_to_4h(hidden, activation=self.act)
        return inner


class GPTNeoXLayer(nn.Module):
    """Attention and MLP on norms of the same stream, or one after the other with ``use_parallel_residual`` off."""

    def __init__(self, config: HFConfig, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        eps = config.positive_float("layer_norm_eps", 1e-5)
        self.parallel = config.boolean("use_parallel_residual", default=True)
        self.input_layernorm = LayerNorm(hidden_size, eps)
        self.attention = GPTNeoXAttention(hidden_size, num_heads, bias=config.boolean("attention_bias", default=True))
        self.post_attention_layernorm = LayerNorm(hidden_size, eps)
        self.mlp = GPTNeoXMLP(config, hidden_size)

    def forward(
        self,
        normed: Tensor,
        hidden: Tensor,
        angles: RotaryAngles,
        kv_cache: Tensor,
        attention: AttentionPlan,
        next_norm: nn.Module | None,
    ) -> tuple[Tensor, Tensor]:
        """Run the layer on the stream and its ``input_layernorm``; returns ``next_norm`` of the new stream, and it."""
        attn, mlp = self.attention, self.mlp
        heads = attn(normed, angles, kv_cache, attention)
        if self.parallel:
            attended = attn.dense(heads, residual=hidden)
            normed = self.post_attention_layernorm(hidden)
        else:
            normed, attended = linear_add_norm(attn.dense, heads, hidden, self.post_attention_layernorm)
        return linear_add_norm(mlp.dense_4h_to_h, mlp(normed), attended, next_norm)

    def outline(self) -> PreNormBlock:
        """The parts of ``forward``."""
        attn, mlp = self.attention, self.mlp
        return PreNormBlock(
            self.input_layernorm, attn.query_key_value, attn.scale, attn.dense,
            self.post_attention_layernorm, DenseMLPParts(mlp.dense_h_to_4h, mlp.act, mlp.dense_4h_to_h),
            rotary=0, is_by_head=True, is_parallel=self.parallel,
        )  # fmt: skip


class GPTNeoXForCausalLM(CausalLM):
    """``GPTNeoXForCausalLM`` of a checkpoint."""

    prefixes = ("gpt_neox.",)
    embed_tokens_name = "embed_in.weight"
    head_name = "embed_out.weight"

    def __init__(self, hf_config: Mapping[str, Any], max_model_len: int) -> None:
        """See ``CausalLM.__init__``."""
        super().__init__(hf_config, max_model_len)
        config = HFConfig(hf_config)
        config.refuse_unless("quantization_config", supported=None)
        hidden_size, num_heads = config.multi_head(["hidden_size"], ["num_attention_heads"])
        num_layers = config.positive_int("num_hidden_layers")
        head_dim = hidden_size // num_heads
        self.vocab_size = config.positive_int("vocab_size")
        self.max_positions = None  # rotary angles exist for every position
        self.hidden_size = hidden_size
        tied = config.boolean("tie_word_embeddings", default=False)

        self.embed_tokens = self.make_embedding(hidden_size, tied=tied)
        self.layers = StageLayers(lambda _: GPTNeoXLayer(config, hidden_size, num_heads), num_layers)
        self.kv_cache_spec = KVCacheSpec(len(self.layers), head_parts(num_heads, num_heads)[1].count, head_dim)
        eps = config.positive_float("layer_norm_eps", 1e-5)
        self.final_layer_norm = LayerNorm(hidden_size, eps) if self.stage.is_last else None
        self.rotary = RotaryEmbedding.from_config(_rope_of(hf_config), head_dim, max_model_len, partial=True)
        self.lm_head = self.make_head(hidden_size, tied=tied)

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:  # noqa: ARG002 -- layers use positions
        """See ``CausalLM.embed``."""
        hidden: Tensor = self.embed_tokens(input_ids)
        return hidden

    def run_layers(
        self, hidden: Tensor, positions: Tensor, kv_caches: Sequence[Tensor], attention: AttentionPlan
    ) -> Tensor:
        """See ``CausalLM.run_layers``."""
        if self.decoder_kernel is not None and self.decoder_kernel.takes(hidden.shape[0], attention):
            return self.decoder_kernel.forward(hidden, positions, kv_caches, attention)
        angles = self.rotary.angles(positions, hidden.dtype)
        layers: list[Any] = list(self.layers)
        norms: list[Any] = [*(layer.input_layernorm for layer in layers), self.final_layer_norm]
        normed: Tensor = norms[0](hidden)
        for layer, kv_cache, norm in zip(layers, kv_caches, norms[1:], strict=True):
            normed, hidden = layer(normed, hidden, angles, kv_cache, attention, norm)
        return normed

    def decoder_outline(self) -> PreNormDecoder:
        """See ``CausalLM.decoder_outline``."""
        blocks = (layer.outline() for layer in self.layers if isinstance(layer, GPTNeoXLayer))
        return PreNormDecoder(tuple(blocks), self.final_layer_norm, (self.rotary,))

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """See ``CausalLM.checkpoint_tensors``: the embedding has another name."""
        tensors = super().checkpoint_tensors()
        own_name = "embed_tokens.weight"
        return {self.embed_tokens_name if name == own_name else name: tensor for name, tensor in tensors.items()}

    def is_ignored(self, name: str) -> bool:
        """Whether this is a causal mask or rotary frequencies, which older checkpoints contain."""
        return _DERIVED.fullmatch(name) is not None


def _rope_of(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with ``rotary_pct`` and ``rotary_emb_base`` under the names of other architectures."""
    config = dict(hf_config)
    config["partial_rotary_factor"] = hf_config.get("rotary_pct", 0.25)
    config["rope_theta"] = hf_config.get("rotary_emb_base", 10000.0)
    return config
