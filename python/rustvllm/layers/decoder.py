"""The blocks of a decoder as parts, for what can run all of them in one call instead of module by module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from rustvllm.layers.activation import Activation
from rustvllm.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class PreNormBlock:
    """Causal attention and an MLP, each on the normed stream and added to it; positions are in the stream.

    Attributes:
        attention_norm: before attention.
        qkv: query, key and value of all heads, one after the other.
        scale: factor on the products of queries and keys.
        out: from the heads to the stream.
        mlp_norm: before the MLP.
        up: from the stream to the MLP's features.
        activation: of those.
        down: from them to the stream.
    """

    attention_norm: nn.Module
    qkv: Linear
    scale: float
    out: Linear
    mlp_norm: nn.Module
    up: Linear
    activation: Activation
    down: Linear


@dataclass(frozen=True, slots=True)
class PreNormDecoder:
    """All blocks and the norm at their end."""

    blocks: tuple[PreNormBlock, ...]
    last_norm: nn.Module


class DecoderKernel(Protocol):
    """Runs a ``PreNormDecoder`` in one call; it computes what the modules compute."""

    def takes(self, hidden: Tensor, attention: object) -> bool:
        """Whether it runs a step of so many tokens, whose attention was planned so; else the modules do."""
        ...

    def forward(self, hidden: Tensor, kv_caches: Sequence[Tensor], attention: object) -> Tensor:
        """All blocks and the last norm.

        Args:
            hidden: ``[num_tokens, hidden_size]``, the embedded tokens; it may be overwritten.
            kv_caches: of each block, written and read.
            attention: the step's plan.

        Returns:
            ``[num_tokens, hidden_size]``, normalised.
        """
        ...
