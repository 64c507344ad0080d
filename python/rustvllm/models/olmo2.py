"""OLMo 2 and 3: norms after attention and MLP instead of before, and norms over all heads of queries and of keys.

OLMo 3 has short windows in three layers of four, in which the rotary positions of longer contexts are not scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rustvllm.attention.backend import AttentionPlan
from rustvllm.layers.decoder import PreNormBlock
from rustvllm.layers.norm import RMSNorm, add_norm
from rustvllm.layers.parallel import HeadsNorm, head_parts
from rustvllm.layers.rotary import RotaryAngles, RotaryEmbedding
from rustvllm.models.decoder.gated_mlp import GatedMLP
from rustvllm.models.decoder.rotary_attention import HeadSizes, RotaryAttention
from rustvllm.models.decoder.rotary_lm import RotaryLayer, RotaryLM
from rustvllm.models.hf_config import FULL_ATTENTION, SLIDING_ATTENTION, HFConfig

_KINDS = (FULL_ATTENTION, SLIDING_ATTENTION)
"""The kinds of OLMo 3's layers; each has its rotation, under its index here."""

_PERIOD = 4
"""Of OLMo 3's layers, the last of so many has no window."""


class WholeNormAttention(RotaryAttention):
    """Attention that norms all heads of queries together, and all heads of keys.

    Args:
        sizes: See ``RotaryAttention``.
        eps: Of both norms.
        options: See ``RotaryAttention``.
    """

    q_norm: HeadsNorm
    k_norm: HeadsNorm

    def __init__(self, sizes: HeadSizes, eps: float, **options: Any) -> None:
        super().__init__(sizes, **options)
        query, key = head_parts(sizes.num_heads, sizes.num_kv_heads)
        self.q_norm = HeadsNorm(query, sizes.head_dim, eps)
        self.k_norm = HeadsNorm(key, sizes.head_dim, eps)

    def project(self, hidden: Tensor) -> Tensor:
        """See ``RotaryAttention.project``; queries and keys are normed."""
        widths = [heads * self.sizes.head_dim for heads in (self.sizes.num_heads, *[self.sizes.num_kv_heads] * 2)]
        query, key, value = self.qkv_proj(hidden).split(widths, -1)
        query, key = HeadsNorm.norm_both(self.q_norm, self.k_norm, query, key)
        return torch.cat((query, key, value), -1).view(hidden.shape[0], -1, self.sizes.head_dim)

    @property
    def head_norms(self) -> tuple[nn.Module, nn.Module] | None:
        """None: the projection is followed by norms of all heads together."""
        return None


class PostNormLayer(RotaryLayer):
    """Attention and MLP: each reads the stream as it is, and adds its normed result to the stream.

    Args:
        eps: Of the norms after both.
        self_attn: Attention.
        mlp: The MLP.
    """

    self_attn: WholeNormAttention

    def __init__(self, eps: float, self_attn: WholeNormAttention, mlp: GatedMLP) -> None:
        super().__init__()
        hidden_size = self_attn.sizes.hidden_size
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(hidden_size, eps)
        self.mlp = mlp
        self.post_feedforward_layernorm = RMSNorm(hidden_size, eps)

    def forward(
        self, hidden: Tensor, angles: RotaryAngles | None, kv_cache: Tensor, attention: AttentionPlan
    ) -> Tensor:
        """See ``RotaryLayer.forward``."""
        attended = self.self_attn(hidden, angles, kv_cache, attention)
        hidden, _ = add_norm(None, attended, hidden, self.post_attention_layernorm)
        return add_norm(None, self.mlp(hidden), hidden, self.post_feedforward_layernorm)[0]

    def outline(self) -> PreNormBlock:
        """See ``RotaryLayer.outline``."""
        attn = self.self_attn
        return PreNormBlock(
            None, attn.qkv_proj, attn.scale, attn.o_proj, None, self.mlp.outline(),
            head_norms=(attn.q_norm, attn.k_norm), rotary=attn.rotary, sliding_window=attn.sliding_window,
            post_norms=(self.post_attention_layernorm, self.post_feedforward_layernorm),
        )  # fmt: skip


class Olmo2ForCausalLM(RotaryLM):
    """``Olmo2ForCausalLM`` of a checkpoint."""

    default_eps = 1e-5

    def layer_maker(self, config: HFConfig, sizes: HeadSizes, num_layers: int) -> Callable[[int], PostNormLayer]:
        """Layers with biases if the configuration has them."""
        config.refuse_unless("clip_qkv", supported=None)
        eps, bias = self.norm_eps(config), config.boolean("attention_bias", default=False)
        inner_size, act = config.positive_int("intermediate_size"), config.string("hidden_act", "silu")
        types = self.make_layer_types(config, num_layers)
        windows = config.windows(types, default=4096)
        return lambda layer: PostNormLayer(
            eps,
            WholeNormAttention(
                sizes,
                eps,
                qkv_bias=bias,
                out_bias=bias,
                sliding_window=windows[layer],
                rotary=_KINDS.index(types[layer]),
            ),
            GatedMLP(sizes.hidden_size, inner_size, act),
        )

    def make_layer_types(self, config: HFConfig, num_layers: int) -> list[str]:  # noqa: ARG002 -- all are alike
        """The kind of attention of each layer."""
        return [FULL_ATTENTION] * num_layers


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """``Olmo3ForCausalLM`` of a checkpoint."""

    def __init__(self, hf_config: Mapping[str, Any], max_model_len: int) -> None:
        """See ``CausalLM.__init__``; without a ``rope_theta`` it is half a million."""
        super().__init__({"rope_theta": 5e5, **hf_config}, max_model_len)

    def make_layer_types(self, config: HFConfig, num_layers: int) -> list[str]:
        """From ``layer_types``, else every fourth layer has no window."""
        return config.layer_types(
            num_layers, lambda layer: SLIDING_ATTENTION if (layer + 1) % _PERIOD else FULL_ATTENTION
        )

    def make_rotaries(
        self, hf_config: Mapping[str, Any], head_dim: int, max_model_len: int
    ) -> tuple[RotaryEmbedding, ...]:
        """See ``RotaryLM.make_rotaries``: older configurations have a ``rope_scaling`` for full attention only."""
        unscaled = {**hf_config, "rope_scaling": None}
        return tuple(
            RotaryEmbedding.from_config(
                hf_config if kind == FULL_ATTENTION else unscaled, head_dim, max_model_len, layer_type=kind
            )
            for kind in _KINDS
        )
