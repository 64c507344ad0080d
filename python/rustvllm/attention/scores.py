"""Attention with changed scores, in plain torch: sliding window, soft cap, ALiBi, sinks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """How the products of queries and keys become scores; ``AttentionPlan.forward`` explains each option.

    Attributes:
        scale: Factor on the products.
        sliding_window: How many keys a query sees, including its own; None: all.
        soft_cap: Limit of the scaled products; None if there is none.
        alibi_slopes: float32 ``[num_heads]``; None if positions add nothing.
        sinks: float32 ``[num_heads]``; None if keys alone share the softmax.
    """

    scale: float
    sliding_window: int | None
    soft_cap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None = None

    @classmethod
    def of(
        cls,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        alibi_slopes: Sequence[float] | None,
        query: Tensor,
        sinks: Tensor | None = None,
    ) -> ScoreOptions:
        """The options of a layer whose ``query`` is ``[num_tokens, num_heads, head_dim]``.

        Raises:
            ValueError: An option is invalid; the message has its name and value.
        """
        if sliding_window is not None and sliding_window < 1:
            raise ValueError(
                f"sliding_window is {sliding_window}, but must be at least 1, since a query sees itself; None means no "
                "window"
            )
        if soft_cap is not None and not (math.isfinite(soft_cap) and soft_cap > 0):
            raise ValueError(f"soft_cap is {soft_cap}, but it must be a number above 0")
        slopes = None
        if alibi_slopes:
            if len(alibi_slopes) != query.shape[1]:
                raise ValueError(f"alibi_slopes has length {len(alibi_slopes)}, expected {query.shape[1]}")
            slopes = torch.tensor(alibi_slopes, dtype=torch.float32, device=query.device)
        if sinks is not None and sinks.shape != query.shape[1:2]:
            raise ValueError(f"sinks has the shape {list(sinks.shape)}, expected {[query.shape[1]]}")
        sinks = None if sinks is None else sinks.to(torch.float32)
        return cls(scale, sliding_window, soft_cap, slopes, sinks)

    @property
    def is_plain(self) -> bool:
        """Whether there are no options other than the scale."""
        options = self.sliding_window, self.soft_cap, self.alibi_slopes, self.sinks
        return all(option is None for option in options)

    def first_visible(self, position: int) -> int:
        """The position of the earliest key that a query at ``position`` sees."""
        return 0 if self.sliding_window is None else max(0, position + 1 - self.sliding_window)


def attend_by_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    options: ScoreOptions,
    visible: Tensor | None = None,
) -> Tensor:
    """Causal attention of queries over keys with known positions; computes every score in float32.

    A query must see at least one of the keys. Values of masked keys must be finite.

    Args:
        query: ``[batch, num_heads, n, head_dim]``.
        key: ``[batch, num_kv_heads, s, head_dim]``.
        value: Shaped like ``key``.
        query_positions: int ``[batch or 1, n]``.
        key_positions: int ``[s]``.
        options: How products become scores.
        visible: int ``[n]``, the position of the first key behind those that each query sees; None: the one behind its
            own. With it there is one batch.

    Returns:
        Shaped like ``query``.
    """
    batch, num_heads, n, head_dim = query.shape
    num_kv_heads = key.shape[1]
    # Query heads that share a KV head take the place of further queries of one sequence: [B, KVH, G * n, D].
    q = query.reshape(batch, num_kv_heads, -1, head_dim)
    scores = torch.matmul(q, key.transpose(-1, -2)).to(torch.float32).mul_(options.scale)
    if options.soft_cap is not None:
        scores = scores.div_(options.soft_cap).tanh_().mul_(options.soft_cap)
    scores = scores.view(batch, num_heads, n, -1)
    distance = key_positions - query_positions[..., None]  # [B or 1, n, s]
    if options.alibi_slopes is not None:
        scores.add_(options.alibi_slopes[:, None, None] * distance[:, None])
    hidden = distance > 0 if visible is None else (key_positions >= visible[:, None])[None]
    if options.sliding_window is not None:
        hidden |= distance <= -options.sliding_window
    scores.masked_fill_(hidden[:, None], -torch.inf)
    if options.sinks is None:
        weights = scores.softmax(-1).to(value.dtype)
    else:
        sinks = options.sinks[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1].to(value.dtype)
    return torch.matmul(weights.reshape(batch, num_kv_heads, -1, key.shape[2]), value).view(query.shape)
