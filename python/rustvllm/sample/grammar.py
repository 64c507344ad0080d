"""Applies the masks of grammars to logits: ids that a row may not take become impossible."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    """Make ids that some rows may not take impossible, in place.

    Args:
        logits: float ``[n, vocab_size]``.
        bitmask: int32 ``[m, ceil(vocab_size / 32)]`` on the same device; bit ``i % 32`` of word ``i // 32`` is for id
            ``i``.
        rows: int64 ``[m]``, the row of logits of each mask.
    """
    vocab_size = logits.shape[-1]
    places = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    allowed = ((bitmask[:, :, None] >> places) & 1).flatten(1)[:, :vocab_size].to(torch.bool)
    logits.index_copy_(0, rows, logits[rows].masked_fill_(~allowed, -torch.inf))
