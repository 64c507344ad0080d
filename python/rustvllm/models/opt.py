"""OPT: learned positions, whose table begins with two unused rows, and norms before or after attention and MLP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from rustvllm.attention.backend import AttentionPlan
from rustvllm.attention.metadata import KVCacheSpec
from rustvllm.layers.activation import get_activation
from rustvllm.layers.decoder import DenseMLPParts, PreNormBlock, PreNormDecoder
from rustvllm.layers.linear import Embedding, Linear
from rustvllm.layers.norm import LayerNorm, PlainLayerNorm, linear_add_norm
from rustvllm.layers.parallel import NoEmbedding, RowLinear, StageLayers, column_linear, head_parts, qkv_linear
from rustvllm.models.hf_config import HFConfig
from rustvllm.models.interface import CausalLM, linear_parts

POSITION_OFFSET = 2
"""Number of rows in the position table before that of position 0."""
NORM_EPS = 1e-5
"""Fixed for this architecture."""


class OPTAttention(nn.Module):
    """Multi-head attention; query, key and value are one projection."""

    def __init__(self, hidden_size: int, num_heads: int, *, bias: bool) -> None:
        super().__init__()
        self.num_heads = head_parts(num_heads, num_heads)[0].count
        self.head_dim = hidden_size // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv_proj = qkv_linear(hidden_size, num_heads, num_heads, self.head_dim, bias=bias)
        self.out_proj = RowLinear(hidden_size, hidden_size, bias=bias)

    def forward(self, hidden: Tensor, kv_cache: Tensor, attention: AttentionPlan) -> Tensor:
        """The heads side by side; the layer applies ``out_proj``."""
        qkv = self.qkv_proj(hidden).view(-1, 3, self.num_heads, self.head_dim)
        query, key, value = qkv.unbind(1)  # each [T, H, D]
        return attention.forward(query, key, value, kv_cache, self.scale).flatten(1)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Names within the layer; see ``CausalLM.checkpoint_tensors``."""
        size = self.num_heads * self.head_dim
        parts = linear_parts(self.qkv_proj, {"q_proj": size, "k_proj": size, "v_proj": size})
        return parts | linear_parts(self.out_proj, {"out_proj": self.out_proj.weight.shape[0]})


class OPTLayer(nn.Module):
    """Attention and MLP, each added to the stream; norms come before each, or after each sum."""

    def __init__(self, config: HFConfig, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        bias = config.boolean("enable_bias", default=True)
        inner_size = config.positive_int("ffn_dim")
        self.norm_first = config.boolean("do_layer_norm_before", default=True)
        self.self_attn = OPTAttention(hidden_size, num_heads, bias=bias)
        self.self_attn_layer_norm = _norm(config, hidden_size)
        self.fc1 = column_linear(hidden_size, inner_size, bias=bias)
        self.act = get_activation(config.string("activation_function", "relu"))
        self.fc2 = RowLinear(inner_size, hidden_size, bias=bias)
        self.final_layer_norm = _norm(config, hidden_size)

    def forward(
        self, normed: Tensor, hidden: Tensor, kv_cache: Tensor, attention: AttentionPlan, next_norm: nn.Module | None
    ) -> tuple[Tensor, Tensor]:
        """Run the layer on attention's input and the stream; returns the same for the next layer."""
        attn = self.self_attn
        heads = attn(normed, kv_cache, attention)
        if self.norm_first:
            normed, hidden = linear_add_norm(attn.out_proj, heads, hidden, self.final_layer_norm)
            return linear_add_norm(self.fc2, self.fc1(normed, activation=self.act), hidden, next_norm)
        hidden, _ = linear_add_norm(attn.out_proj, heads, hidden, self.self_attn_layer_norm)
        hidden, _ = linear_add_norm(self.fc2, self.fc1(hidden, activation=self.act), hidden, self.final_layer_norm)
        return hidden, hidden

    @property
    def first_norm(self) -> nn.Module | None:
        """The norm of the stream before attention; None if attention reads the stream itself."""
        return self.self_attn_layer_norm if self.norm_first else None

    def outline(self) -> PreNormBlock:
        """The parts of ``forward`` if the norms come first."""
        attn = self.self_attn
        return PreNormBlock(
            self.self_attn_layer_norm, attn.qkv_proj, attn.scale, attn.out_proj,
            self.final_layer_norm, DenseMLPParts(self.fc1, self.act, self.fc2),
        )  # fmt: skip


class OPTForCausalLM(CausalLM):
    """``OPTForCausalLM`` of a checkpoint."""

    prefixes = ("model.decoder.", "decoder.")
    embed_tokens_name = "embed_tokens.weight"

    def __init__(self, hf_config: Mapping[str, Any], max_model_len: int) -> None:
        """See ``CausalLM.__init__``."""
        super().__init__(hf_config, max_model_len)
        config = HFConfig(hf_config)
        config.refuse_unless("quantization_config", supported=None)
        hidden_size, num_heads = config.multi_head(["hidden_size"], ["num_attention_heads"])
        num_layers = config.positive_int("num_hidden_layers")
        word_size = config.positive_int("word_embed_proj_dim", default=hidden_size)
        self.vocab_size = config.positive_int("vocab_size")
        self.max_positions = config.positive_int("max_position_embeddings")
        self.hidden_size = hidden_size
        tied = config.boolean("tie_word_embeddings", default=True)

        self.embed_tokens = self.make_embedding(word_size, tied=tied)
        num_positions = self.max_positions + POSITION_OFFSET
        is_first, is_last = self.stage.is_first, self.stage.is_last
        self.embed_positions = Embedding(num_positions, hidden_size) if is_first else NoEmbedding()
        projects = word_size != hidden_size
        self.project_in = Linear(word_size, hidden_size, bias=False) if projects and is_first else None
        self.project_out = Linear(hidden_size, word_size, bias=False) if projects and is_last else None
        self.layers = StageLayers(lambda _: OPTLayer(config, hidden_size, num_heads), num_layers)
        self.kv_cache_spec = KVCacheSpec(
            len(self.layers), head_parts(num_heads, num_heads)[1].count, hidden_size // num_heads
        )
        ends_normed = config.boolean("do_layer_norm_before", default=True)
        ends_normed = ends_normed and not config.boolean("_remove_final_layer_norm", default=False)
        self._has_outline = ends_normed
        self.final_layer_norm = _norm(config, hidden_size) if ends_normed and is_last else None
        self.lm_head = self.make_head(word_size, tied=tied)

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """See ``CausalLM.embed``."""
        hidden: Tensor = self.embed_tokens(input_ids)
        if self.project_in is not None:
            hidden = self.project_in(hidden)
        embedded: Tensor = hidden + self.embed_positions(positions + POSITION_OFFSET)
        return embedded

    def run_layers(
        self,
        hidden: Tensor,
        positions: Tensor,
        kv_caches: Sequence[Tensor],
        attention: AttentionPlan,
    ) -> Tensor:
        """See ``CausalLM.run_layers``; if embeddings are narrower than the stream, so is the result."""
        if self.decoder_kernel is not None and self.decoder_kernel.takes(hidden.shape[0], attention):
            hidden = self.decoder_kernel.forward(hidden, positions, kv_caches, attention)
        else:
            layers: list[Any] = list(self.layers)
            norms: list[Any] = [*(layer.first_norm for layer in layers), self.final_layer_norm]
            normed: Tensor = hidden if norms[0] is None else norms[0](hidden)
            for layer, kv_cache, norm in zip(layers, kv_caches, norms[1:], strict=True):
                normed, hidden = layer(normed, hidden, kv_cache, attention, norm)
            hidden = normed
        return hidden if self.project_out is None else self.project_out(hidden)

    def decoder_outline(self) -> PreNormDecoder | None:
        """See ``CausalLM.decoder_outline``."""
        if not self._has_outline or not all(layer.norm_first for layer in self.layers):
            return None
        return PreNormDecoder(
            tuple(layer.outline() for layer in self.layers if isinstance(layer, OPTLayer)),
            self.final_layer_norm,
            ends_in_head=self.project_out is None,
        )


def _norm(config: HFConfig, hidden_size: int) -> nn.Module:
    affine = config.boolean("layer_norm_elementwise_affine", default=True)
    return LayerNorm(hidden_size, NORM_EPS) if affine else PlainLayerNorm(hidden_size, NORM_EPS)
