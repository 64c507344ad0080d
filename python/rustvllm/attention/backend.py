"""The interface of attention backends: one plan per step, one call per layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from torch import Tensor

from rustvllm.attention.metadata import AttentionMetadata


class AttentionPlan(Protocol):
    """Attention for one step, planned once and used by every layer."""

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
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write the new keys and values to the cache, then attend causally over everything in it.

        ``AttentionMetadata.visible`` may let a query also see keys behind it, up to the last of an image.

        A score is ``query · key · scale``; then the soft cap, ALiBi and the mask are applied in this order. The softmax
        over a query's scores weights the values.

        The keys and values of **all** requests are written before any request's attention reads, because two requests
        of a step may share blocks: one may fill what the other reads.

        Args:
            query: ``[num_tokens, num_heads, head_dim]``.
            key: ``[num_tokens, num_kv_heads, head_dim]``; ``num_heads`` is a multiple of ``num_kv_heads``.
            value: Shaped like ``key``.
            kv_cache: This layer's ``[2, num_blocks, block_size, num_kv_heads, head_dim]``.
            scale: Factor on the products of queries and keys.
            sliding_window: A query at position ``p`` sees the keys at ``p − sliding_window + 1 … p``, so with 1 it sees
                only itself; None: all up to ``p``. Older keys stay in the cache. Keys behind ``p`` that the query sees
                do not count.
            soft_cap: Replaces a scaled product ``s`` by ``soft_cap · tanh(s / soft_cap)``; None disables this.
            alibi_slopes: One per query head; ``slope · (key position − query position)`` is added to each score. None
                or empty disables this.
            sinks: ``[num_heads]`` of any float dtype: a further score of each head, which takes its share of the
                softmax and has no value; None: there are none.

        Returns:
            ``[num_tokens, num_heads, head_dim]``.

        Raises:
            ValueError: The window is below 1, the cap is not positive and finite, or there is not one slope or one
                sink per head.
        """
        ...


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorms of each query head and of each key head.

    Attributes:
        query: ``[head_dim]``, the weight.
        key: ``[head_dim]``, the weight.
        eps: The epsilon of both.
        weight_offset: Added to both weights; if it is 1, all is computed in float32, see ``layers.norm.GemmaRMSNorm``.
    """

    query: Tensor
    key: Tensor
    eps: float
    weight_offset: float


class RotaryAttentionPlan(AttentionPlan, Protocol):
    """A plan that also norms and rotates heads, which saves launches."""

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
        sinks: Tensor | None = None,
        is_by_head: bool = False,
    ) -> Tensor:
        """Norm and rotate queries and keys, then continue as ``forward`` does.

        Args:
            qkv: ``[num_tokens, num_heads + 2 · num_kv_heads, head_dim]``: queries, keys, values; contiguous.
            num_heads: Number of query heads.
            positions: int32 ``[num_tokens]``.
            table: ``[length, 2 · num_pairs]``: the cosines and then the sines of each position's angles.
            kv_cache: See ``forward``.
            scale: See ``forward``.
            head_norms: None if heads are not normed.
            sliding_window: See ``forward``.
            soft_cap: See ``forward``.
            sinks: See ``forward``.
            is_by_head: Whether ``qkv`` has query, key and value of one head after the other instead.

        Returns:
            ``[num_tokens, num_heads, head_dim]``.
        """
        ...


def rotary_plan(plan: AttentionPlan) -> RotaryAttentionPlan | None:
    """The plan, if it can rotate heads itself; else None."""
    return cast("RotaryAttentionPlan", plan) if hasattr(plan, "forward_rotary") else None


class AttentionBackend(Protocol):
    """Makes plans.

    Attributes:
        name: Its name in the configuration.
        takes_table_rows: Whether it reads ``AttentionMetadata.table_rows``, so that no block table need be gathered.
    """

    name: str
    takes_table_rows: bool

    def plan(self, metadata: AttentionMetadata) -> AttentionPlan:
        """Prepare a step; this does the work that is the same for all layers."""
        ...
