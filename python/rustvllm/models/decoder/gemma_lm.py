"""Parts that Gemma 2 and 3 share: norms around attention and MLP, a scaled embedding, and soft caps on logits.

Each architecture's file defines its layers' attention and rotary positions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rustvllm.attention.backend import AttentionPlan
from rustvllm.attention.metadata import KVCacheSpec
from rustvllm.layers.decoder import PreNormBlock, PreNormDecoder
from rustvllm.layers.norm import GemmaRMSNorm, add_norm
from rustvllm.layers.parallel import StageLayers
from rustvllm.layers.rotary import RotaryAngles, RotaryEmbedding
from rustvllm.models.decoder.gated_mlp import GatedMLP
from rustvllm.models.decoder.rotary_attention import HeadSizes, RotaryAttention
from rustvllm.models.hf_config import HFConfig
from rustvllm.models.interface import CausalLM


class GemmaLayer(nn.Module):
    """Attention and MLP, each with a norm before and after, and added to the stream."""

    def __init__(self, eps: float, self_attn: RotaryAttention, mlp: GatedMLP) -> None:
        super().__init__()
        hidden_size = self_attn.sizes.hidden_size
        self.input_layernorm = GemmaRMSNorm(hidden_size, eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = GemmaRMSNorm(hidden_size, eps)
        self.pre_feedforward_layernorm = GemmaRMSNorm(hidden_size, eps)
        self.mlp = mlp
        self.post_feedforward_layernorm = GemmaRMSNorm(hidden_size, eps)

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
        attended = self.self_attn(normed, angles, kv_cache, attention)
        normed, hidden = add_norm(self.pre_feedforward_layernorm, attended, hidden, self.post_attention_layernorm)
        return add_norm(next_norm, self.mlp(normed), hidden, self.post_feedforward_layernorm)

    def outline(self, rotary: int) -> PreNormBlock:
        """The parts of ``forward``; ``rotary`` is the index of its rotation."""
        attn = self.self_attn
        return PreNormBlock(
            self.input_layernorm, attn.qkv_proj, attn.scale, attn.o_proj,
            self.pre_feedforward_layernorm, self.mlp.outline(),
            head_norms=attn.head_norms, rotary=rotary, sliding_window=attn.sliding_window, soft_cap=attn.soft_cap,
            post_norms=(self.post_attention_layernorm, self.post_feedforward_layernorm),
        )  # fmt: skip


class GemmaLM(CausalLM):
    """See the module.

    Attributes:
        default_head_dim: Used if a configuration has no ``head_dim``.
        default_logit_cap: Used if a configuration has no ``final_logit_softcapping``; None: no cap.
        layer_types: The kind of attention of each layer.
        rotary: The rotary embedding of each kind of layer.
    """

    prefixes: tuple[str, ...] = ("model.",)
    embed_tokens_name = "embed_tokens.weight"
    default_head_dim: ClassVar[int]
    default_logit_cap: ClassVar[float | None] = None

    def __init__(self, hf_config: Mapping[str, Any], max_model_len: int) -> None:
        """See ``CausalLM.__init__``."""
        super().__init__(hf_config, max_model_len)
        config = HFConfig(hf_config)
        config.refuse_unless("quantization_config", supported=None)
        config.refuse_unless("use_bidirectional_attention", supported=False)
        sizes = HeadSizes.from_config(config, head_dim=self.default_head_dim)
        num_layers = config.positive_int("num_hidden_layers")
        eps = config.positive_float("rms_norm_eps", 1e-6)
        self.vocab_size = config.positive_int("vocab_size")
        self.max_positions = None  # rotary angles exist for every position
        self.hidden_size = sizes.hidden_size
        self.logit_cap = config.optional_positive_float("final_logit_softcapping", self.default_logit_cap)

        tied = config.boolean("tie_word_embeddings", default=True)
        self.embed_tokens = self.make_embedding(sizes.hidden_size, tied=tied)
        self.embed_scale = embedding_scale(sizes.hidden_size)
        self.layer_types = self.make_layer_types(config, num_layers)
        windows = config.windows(self.layer_types, default=4096)
        self.layers = StageLayers(
            lambda layer: GemmaLayer(
                eps, self.make_attention(config, sizes, windows[layer], eps), gemma_mlp(config, sizes)
            ),
            num_layers,
        )
        self.kv_cache_spec = KVCacheSpec(len(self.layers), sizes.of_rank().num_kv_heads, sizes.head_dim)
        self.norm = GemmaRMSNorm(sizes.hidden_size, eps) if self.stage.is_last else None
        self.rotary = self.make_rotary(hf_config, sizes.head_dim, max_model_len)
        self._rotaries = list(dict.fromkeys(self.rotary.values()))
        own_types = [self.layer_types[layer] for layer in self.stage.own(num_layers)]
        self._rotary_of_layer = [self._rotaries.index(self.rotary[kind]) for kind in own_types]
        self.lm_head = self.make_head(sizes.hidden_size, tied=tied)

    @abstractmethod
    def make_layer_types(self, config: HFConfig, num_layers: int) -> list[str]:
        """The kind of attention of each layer.

        Raises:
            ModelLoadError: The configuration has an unsupported setting.
        """

    @abstractmethod
    def make_attention(self, config: HFConfig, sizes: HeadSizes, window: int | None, eps: float) -> RotaryAttention:
        """The attention of a layer that sees ``window`` keys; None: all keys."""

    @abstractmethod
    def make_rotary(
        self, hf_config: Mapping[str, Any], head_dim: int, max_model_len: int
    ) -> Mapping[str, RotaryEmbedding]:
        """The rotary embedding of each kind of layer; kinds may share one."""

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:  # noqa: ARG002 -- layers use positions
        """See ``CausalLM.embed``."""
        hidden: Tensor = self.embed_tokens(input_ids) * self.embed_scale
        return hidden

    def run_layers(
        self, hidden: Tensor, positions: Tensor, kv_caches: Sequence[Tensor], attention: AttentionPlan
    ) -> Tensor:
        """See ``CausalLM.run_layers``."""
        if self.decoder_kernel is not None and self.decoder_kernel.takes(hidden.shape[0], attention):
            return self.decoder_kernel.forward(hidden, positions, kv_caches, attention)
        angles = [rotary.angles(positions, hidden.dtype) for rotary in self._rotaries]
        layers: list[Any] = list(self.layers)
        norms: list[Any] = [*(layer.input_layernorm for layer in layers), self.norm]
        normed: Tensor = norms[0](hidden)
        for layer, rotary, kv_cache, norm in zip(layers, self._rotary_of_layer, kv_caches, norms[1:], strict=True):
            normed, hidden = layer(normed, hidden, angles[rotary], kv_cache, attention, norm)
        return normed

    def decoder_outline(self) -> PreNormDecoder:
        """See ``CausalLM.decoder_outline``."""
        layers = zip(self.layers, self._rotary_of_layer, strict=True)
        blocks = (layer.outline(rotary) for layer, rotary in layers if isinstance(layer, GemmaLayer))
        return PreNormDecoder(tuple(blocks), self.norm, tuple(self._rotaries))


def gemma_attention(
    config: HFConfig,
    sizes: HeadSizes,
    window: int | None,
    *,
    soft_cap: float | None = None,
    head_norm_eps: float | None = None,
) -> RotaryAttention:
    """Attention with the scale from ``query_pre_attn_scalar``; heads are normed if ``head_norm_eps`` is given."""
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
    """The gated MLP, with the activation from ``hidden_activation``."""
    inner_size = config.positive_int("intermediate_size")
    return GatedMLP(sizes.hidden_size, inner_size, config.string("hidden_activation", "gelu_pytorch_tanh"))


def embedding_scale(hidden_size: int) -> float:
    """The square root of the width, rounded to the dtype in which the model is built, as in training."""
    return float(torch.tensor(hidden_size**0.5, dtype=torch.get_default_dtype(), device="cpu"))
