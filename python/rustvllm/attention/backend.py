"""The face of an attention backend: one plan per step, one call per layer."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from rustvllm.attention.metadata import AttentionMetadata


class AttentionPlan(Protocol):
    """Attention of one step, prepared once and used by every layer."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, scale: float) -> Tensor:
        """Keep the new keys and values, then attend causally over everything cached.

        The keys and values of **all** requests are written before any request's attention reads: two requests of one
        step may share blocks, one filling what the other reads.

        Args:
            query: ``[num_tokens, num_heads, head_dim]``.
            key: ``[num_tokens, num_kv_heads, head_dim]``; ``num_heads`` is a multiple of ``num_kv_heads``.
            value: as ``key``.
            kv_cache: this layer's ``[2, num_blocks, block_size, num_kv_heads, head_dim]``.
            scale: factor on the products of queries and keys.

        Returns:
            ``[num_tokens, num_heads, head_dim]``.
        """
        ...


class AttentionBackend(Protocol):
    """Makes plans."""

    name: str

    def plan(self, metadata: AttentionMetadata) -> AttentionPlan:
        """Prepare a step; work that does not depend on the layer is done here."""
        ...
