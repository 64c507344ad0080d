"""Parts that Llama and models like it share: an embedding, layers with rotary positions, a norm.

Each architecture's file defines its layers.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from rustvllm.attention.backend import AttentionPlan
from rustvllm.attention.metadata import KVCacheSpec
from rustvllm.layers.decoder import PreNormBlock, PreNormDecoder
from rustvllm.layers.norm import RMSNorm
from rustvllm.layers.parallel import StageLayers
from rustvllm.layers.rotary import RotaryAngles, RotaryEmbedding
from rustvllm.models.decoder.expert_mlp import ExpertMLP
from rustvllm.models.decoder.gated_mlp import GatedMLP
from rustvllm.models.decoder.rotary_attention import HeadSizes, RotaryAttention
from rustvllm.models.hf_config import HFConfig
from rustvllm.models.interface import CausalLM

_INV_FREQ = re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


class RotaryLayer(nn.Module, ABC):
    """A layer of a ``RotaryLM``: attention, then something that computes each token by itself.

    Attributes:
        self_attn: Its attention.
    """

    self_attn: RotaryAttention

    @abstractmethod
    def forward(
        self, hidden: Tensor, angles: RotaryAngles | None, kv_cache: Tensor, attention: AttentionPlan
    ) -> Tensor:
        """The stream, ``[num_tokens, hidden_size]``, after the layer; ``hidden``, before it, may be overwritten."""

    @abstractmethod
    def outline(self) -> PreNormBlock:
        """The parts of ``forward``."""


class PreNormLayer(RotaryLayer):
    """Attention and MLP: each reads the normed stream and adds its result to the stream."""

    def __init__(self, eps: float, self_attn: RotaryAttention, mlp: GatedMLP | ExpertMLP) -> None:
        super().__init__()
        hidden_size = self_attn.sizes.hidden_size
        self.input_layernorm = RMSNorm(hidden_size, eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(hidden_size, eps)
        self.mlp = mlp

    def forward(
        self, hidden: Tensor, angles: RotaryAngles | None, kv_cache: Tensor, attention: AttentionPlan
    ) -> Tensor:
        """See ``RotaryLayer.forward``."""
        hidden = self.self_attn(self.input_layernorm(hidden), angles, kv_cache, attention, residual=hidden)
        out: Tensor = self.mlp(self.post_attention_layernorm(hidden), residual=hidden)
        return out

    def outline(self) -> PreNormBlock:
        """See ``RotaryLayer.outline``."""
        attn = self.self_attn
        return PreNormBlock(
            self.input_layernorm, attn.qkv_proj, attn.scale, attn.o_proj,
            self.post_attention_layernorm, self.mlp.outline(),
            head_norms=attn.head_norms, rotary=attn.rotary, sliding_window=attn.sliding_window,
            soft_cap=attn.soft_cap, sinks=attn.sinks,
        )  # fmt: skip


class RotaryLM(CausalLM):
    """See the module.

    Attributes:
        default_head_dim: Used if a configuration has no ``head_dim``; None: ``hidden_size / num_attention_heads``.
        partial_rotary: Whether a configuration may rotate only a part of each head.
        default_tied: Whether the embedding is also the head where a configuration does not say so.
        default_eps: The epsilon of norms where a configuration has none.
        rotaries: The rotations that layers choose from, by ``RotaryAttention.rotary``.
        rotary: The first of them.
    """

    prefixes: tuple[str, ...] = ("model.",)
    embed_tokens_name = "embed_tokens.weight"
    default_head_dim: ClassVar[int | None] = None
    partial_rotary: ClassVar[bool] = False
    default_tied: ClassVar[bool] = False
    default_eps: ClassVar[float] = 1e-6

    def __init__(self, hf_config: Mapping[str, Any], max_model_len: int) -> None:
        """See ``CausalLM.__init__``."""
        super().__init__(hf_config, max_model_len)
        config = HFConfig(hf_config)
        config.refuse_unless("quantization_config", supported=None)
        sizes = HeadSizes.from_config(config, head_dim=self.default_head_dim)
        num_layers = config.positive_int("num_hidden_layers")
        self.vocab_size = config.positive_int("vocab_size")
        self.max_positions = None  # rotary angles exist for every position
        self.hidden_size = sizes.hidden_size
        tied = config.boolean("tie_word_embeddings", default=self.default_tied)

        self.embed_tokens = self.make_embedding(sizes.hidden_size, tied=tied)
        self.layers = StageLayers(self.layer_maker(config, sizes, num_layers), num_layers)
        self.kv_cache_spec = KVCacheSpec(len(self.layers), sizes.of_rank().num_kv_heads, sizes.head_dim)
        self.norm = RMSNorm(sizes.hidden_size, self.norm_eps(config)) if self.stage.is_last else None
        self.rotaries = self.make_rotaries(hf_config, sizes.head_dim, max_model_len)
        self.rotary = self.rotaries[0]
        self.lm_head = self.make_head(sizes.hidden_size, tied=tied)

    @abstractmethod
    def layer_maker(self, config: HFConfig, sizes: HeadSizes, num_layers: int) -> Callable[[int], RotaryLayer]:
        """A function that makes the architecture's layer with a given number.

        Raises:
            ModelLoadError: The configuration lacks a key, or has an unsupported setting.
        """

    def norm_eps(self, config: HFConfig) -> float:
        """The epsilon of the norms of the stream."""
        return config.positive_float("rms_norm_eps", self.default_eps)

    def make_rotaries(
        self, hf_config: Mapping[str, Any], head_dim: int, max_model_len: int
    ) -> tuple[RotaryEmbedding, ...]:
        """The rotations that layers choose from; at least one."""
        return (RotaryEmbedding.from_config(hf_config, head_dim, max_model_len, partial=self.partial_rotary),)

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:  # noqa: ARG002 -- layers use positions
        """See ``CausalLM.embed``."""
        hidden: Tensor = self.embed_tokens(input_ids)
        return hidden

    def run_layers(
        self, hidden: Tensor, positions: Tensor, kv_caches: Sequence[Tensor], attention: AttentionPlan
    ) -> Tensor:
        """See ``CausalLM.run_layers``."""
        added = self.added_rows
        if self.decoder_kernel is not None and self.decoder_kernel.takes(hidden.shape[0], attention):
            return self.decoder_kernel.forward(hidden, positions, kv_caches, attention, added)
        angles = [rotary.angles(positions, hidden.dtype) for rotary in self.rotaries]
        layers = [layer for layer in self.layers if isinstance(layer, RotaryLayer)]
        for number, (layer, kv_cache) in enumerate(zip(layers, kv_caches, strict=True)):
            index = layer.self_attn.rotary
            hidden = layer(hidden, None if index is None else angles[index], kv_cache, attention)
            if added is not None:
                added.add(number, hidden)
        return hidden if self.norm is None else self.norm(hidden)

    def decoder_outline(self) -> PreNormDecoder:
        """See ``CausalLM.decoder_outline``."""
        blocks = (layer.outline() for layer in self.layers if isinstance(layer, RotaryLayer))
        return PreNormDecoder(tuple(blocks), self.norm, self.rotaries)

    def is_ignored(self, name: str) -> bool:
        """Whether these are rotary frequencies, which older checkpoints contain but the configuration determines."""
        return _INV_FREQ.fullmatch(name) is not None
