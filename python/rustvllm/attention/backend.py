"""The face of an attention backend: one plan per step, one call per layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

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


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorms of each query's head and of each key's.

    Attributes:
        query: ``[head_dim]``, the weight.
        key: likewise.
        eps: Of both.
        weight_offset: Added to both weights; with one all is in float32, see ``layers.norm.GemmaRMSNorm``.
    """

    query: Tensor
    key: Tensor
    eps: float
    weight_offset: float


class RotaryAttentionPlan(AttentionPlan, Protocol):
    """A plan that also does what comes between the projection and attention, in fewer launches."""

    def forward_rotary(
        self,
        qkv: Tensor,
        num_heads: int,
        positions: Tensor,
        table: Tensor,
        kv_cache: Tensor,
        scale: float,
        *,
        head_norms: HeadNorms | None = None,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        is_by_head: bool = False,
    ) -> Tensor:
        """Norm and turn queries and keys; then as ``forward``.

        Args:
            qkv: ``[num_tokens, num_heads + 2 · num_kv_heads, head_dim]``: queries, keys, values; contiguous.
            num_heads: Heads of queries.
            positions: int32 ``[num_tokens]``.
            table: ``[length, 2 · num_pairs]``: cosines and then sines of each position's angles.
            kv_cache: As ``forward`` has it; so are the others.
            scale: likewise.
            head_norms: None: heads are not normed.
            sliding_window: likewise.
            soft_cap: likewise.
            is_by_head: ``qkv`` has query, key and value of one head after the other instead.

        Returns:
            ``[num_tokens, num_heads, head_dim]``.
        """
        ...


def rotary_plan(plan: AttentionPlan) -> RotaryAttentionPlan | None:
    """The plan, if it turns heads itself."""
    return cast("RotaryAttentionPlan", plan) if hasattr(plan, "forward_rotary") else None


class AttentionBackend(Protocol):
    """Makes plans.

    Attributes:
        name: What the configuration calls it.
        takes_table_rows: It reads ``AttentionMetadata.table_rows``, so that no block table has to be gathered.
    """

    name: str
    takes_table_rows: bool

    def plan(self, metadata: AttentionMetadata) -> AttentionPlan:
        """Prepare a step; work that does not depend on the layer is done here."""
        ...
