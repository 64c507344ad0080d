"""The face of an attention backend: one plan per step, one call per layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from rustvllm.attention.metadata import AttentionMetadata


class AttentionPlan(Protocol):
    """Attention of one step, prepared once and used by every layer."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        scale: float,
        *,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        alibi_slopes: Sequence[float] | None = None,
    ) -> Tensor:
        """Keep the new keys and values, then attend causally over everything cached.

        A score is ``query · key · scale``, then bent by the soft cap, then moved by ALiBi, then masked; the softmax
        over a query's scores weighs the values.

        The keys and values of **all** requests are written before any request's attention reads: two requests of one
        step may share blocks, one filling what the other reads.

        Args:
            query: ``[num_tokens, num_heads, head_dim]``.
            key: ``[num_tokens, num_kv_heads, head_dim]``; ``num_heads`` is a multiple of ``num_kv_heads``.
            value: As ``key``.
            kv_cache: This layer's ``[2, num_blocks, block_size, num_kv_heads, head_dim]``.
            scale: Factor on the products of queries and keys.
            sliding_window: A query at position ``p`` sees the keys at ``p − sliding_window + 1 … p``, so 1 sees itself
                alone; None: all up to ``p``. What lies before the window stays in the cache.
            soft_cap: A scaled product ``s`` becomes ``soft_cap · tanh(s / soft_cap)``; None: it stays.
            alibi_slopes: One per query head; ``slope · (key position − query position)`` is added to each score. None
                or empty: nothing is added.

        Returns:
            ``[num_tokens, num_heads, head_dim]``.

        Raises:
            ValueError: A window below one, a cap that is not positive and finite, or not one slope per head.
        """
        ...


class AttentionBackend(Protocol):
    """Makes plans."""

    name: str

    def plan(self, metadata: AttentionMetadata) -> AttentionPlan:
        """Prepare a step; work that does not depend on the layer is done here."""
        ...
