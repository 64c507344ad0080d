"""GPT-2: learned absolute positions, pre-norm blocks, one fused projection for query, key and value."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from rustvllm.attention.backend import AttentionPlan
from rustvllm.attention.metadata import KVCacheSpec
from rustvllm.layers.activation import get_activation
from rustvllm.layers.decoder import DenseMLPParts, PreNormBlock, PreNormDecoder
from rustvllm.layers.linear import Embedding
from rustvllm.layers.norm import LayerNorm, linear_add_norm
from rustvllm.layers.parallel import NoEmbedding, RowLinear, StageLayers, column_linear, head_parts, qkv_linear
from rustvllm.models.hf_config import HFConfig
from rustvllm.models.interface import CausalLM

_CAUSAL_MASK = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")


class GPT2Attention(nn.Module):
    """Multi-head attention; ``num_kv_heads`` equals ``num_heads``."""

    def __init__(self, config: HFConfig, hidden_size: int, num_heads: int, layer: int) -> None:
        super().__init__()
        self.num_heads = head_parts(num_heads, num_heads)[0].count
        self.head_dim = hidden_size // num_heads
        self.scale = self.head_dim**-0.5 if config.boolean("scale_attn_weights", default=True) else 1.0
        if config.boolean("scale_attn_by_inverse_layer_idx", default=False):
            self.scale /= layer + 1
        self.c_attn = qkv_linear(hidden_size, num_heads, num_heads, self.head_dim, bias=True)
        self.c_proj = RowLinear(hidden_size, hidden_size, bias=True)

    def forward(self, hidden: Tensor, kv_cache: Tensor, attention: AttentionPlan) -> Tensor:
        """The heads side by side; the block applies ``c_proj``."""
        qkv = self.c_attn(hidden).view(-1, 3, self.num_heads, self.head_dim)
        query, key, value = qkv.unbind(1)  # each [T, H, D]
        return attention.forward(query, key, value, kv_cache, self.scale).flatten(1)


class GPT2MLP(nn.Module):
    def __init__(self, config: HFConfig, hidden_size: int) -> None:
        super().__init__()
        inner_size = config.positive_int("n_inner", default=4 * hidden_size)
        self.c_fc = column_linear(hidden_size, inner_size, bias=True)
        self.act = get_activation(config.string("activation_function", "gelu_new"))
        self.c_proj = RowLinear(inner_size, hidden_size, bias=True)

    def forward(self, hidden: Tensor) -> Tensor:
        """The features; the block applies ``c_proj``."""
        inner: Tensor = self.c_fc(hidden, activation=self.act)
        return inner


class GPT2Block(nn.Module):
    def __init__(self, config: HFConfig, hidden_size: int, num_heads: int, layer: int) -> None:
        super().__init__()
        eps = config.positive_float("layer_norm_epsilon", 1e-5)
        self.ln_1 = LayerNorm(hidden_size, eps)
        self.attn = GPT2Attention(config, hidden_size, num_heads, layer)
        self.ln_2 = LayerNorm(hidden_size, eps)
        self.mlp = GPT2MLP(config, hidden_size)

    def forward(
        self, normed: Tensor, hidden: Tensor, kv_cache: Tensor, attention: AttentionPlan, next_norm: nn.Module | None
    ) -> tuple[Tensor, Tensor]:
        """Run the block on the stream and its ``ln_1``; returns ``next_norm`` of the new stream, and the stream."""
        attn, mlp = self.attn, self.mlp
        normed, hidden = linear_add_norm(attn.c_proj, attn(normed, kv_cache, attention), hidden, self.ln_2)
        return linear_add_norm(mlp.c_proj, mlp(normed), hidden, next_norm)

    def outline(self) -> PreNormBlock:
        """The parts of ``forward``."""
        attn, mlp = self.attn, self.mlp
        parts = DenseMLPParts(mlp.c_fc, mlp.act, mlp.c_proj)
        return PreNormBlock(self.ln_1, attn.c_attn, attn.scale, attn.c_proj, self.ln_2, parts)


class GPT2LMHeadModel(CausalLM):
    """``GPT2LMHeadModel`` of a checkpoint."""

    prefixes = ("transformer.",)
    embed_tokens_name = "wte.weight"

    def __init__(self, hf_config: Mapping[str, Any], max_model_len: int) -> None:
        """See ``CausalLM.__init__``."""
        super().__init__(hf_config, max_model_len)
        config = HFConfig(hf_config)
        config.refuse_unless("add_cross_attention", supported=False)
        config.refuse_unless("quantization_config", supported=None)
        hidden_size, num_heads = config.multi_head(["n_embd", "hidden_size"], ["n_head", "num_attention_heads"])
        num_layers = config.positive_int("n_layer", "num_hidden_layers")
        self.vocab_size = config.positive_int("vocab_size")
        self.max_positions = config.positive_int("n_positions", "n_ctx", "max_position_embeddings")
        self.hidden_size = hidden_size
        tied = config.boolean("tie_word_embeddings", default=True)

        self.embed_tokens = self.make_embedding(hidden_size, tied=tied)
        self.wpe = Embedding(self.max_positions, hidden_size) if self.stage.is_first else NoEmbedding()
        self.h = StageLayers(lambda layer: GPT2Block(config, hidden_size, num_heads, layer), num_layers)
        self.kv_cache_spec = KVCacheSpec(
            len(self.h), head_parts(num_heads, num_heads)[1].count, hidden_size // num_heads
        )
        eps = config.positive_float("layer_norm_epsilon", 1e-5)
        self.ln_f = LayerNorm(hidden_size, eps) if self.stage.is_last else None
        self.lm_head = self.make_head(hidden_size, tied=tied)

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """See ``CausalLM.embed``."""
        hidden: Tensor = self.embed_tokens(input_ids) + self.wpe(positions)
        return hidden

    def run_layers(
        self,
        hidden: Tensor,
        positions: Tensor,
        kv_caches: Sequence[Tensor],
        attention: AttentionPlan,
    ) -> Tensor:
        """See ``CausalLM.run_layers``."""
        if self.decoder_kernel is not None and self.decoder_kernel.takes(hidden.shape[0], attention):
            return self.decoder_kernel.forward(hidden, positions, kv_caches, attention)
        blocks: list[Any] = list(self.h)
        norms: list[Any] = [*(block.ln_1 for block in blocks), self.ln_f]
        normed: Tensor = norms[0](hidden)
        for block, kv_cache, norm in zip(blocks, kv_caches, norms[1:], strict=True):
            normed, hidden = block(normed, hidden, kv_cache, attention, norm)
        return normed

    def decoder_outline(self) -> PreNormDecoder:
        """See ``CausalLM.decoder_outline``."""
        return PreNormDecoder(tuple(block.outline() for block in self.h if isinstance(block, GPT2Block)), self.ln_f)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """See ``CausalLM.checkpoint_tensors``: the weights of blocks are stored as ``[in, out]`` (Conv1D)."""
        tensors: dict[str, Tensor] = {}
        for layer, block in self.h.named_children():
            for name, parameter in block.named_parameters():
                tensors[f"h.{layer}.{name}"] = parameter.t() if parameter.dim() == 2 else parameter
        names = {"embed_tokens": "wte", "wpe": "wpe", "ln_f": "ln_f"}
        for name, stored in names.items():
            own = () if (part := getattr(self, name)) is None else part.named_parameters()
            tensors |= {f"{stored}.{kind}": parameter for kind, parameter in own}
        return tensors

    def is_ignored(self, name: str) -> bool:
        """Whether this is a causal mask, which older checkpoints contain."""
        return _CAUSAL_MASK.fullmatch(name) is not None
