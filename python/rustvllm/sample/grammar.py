"""Grammar bitmasks: which ids of the vocabulary each sampled row may take."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

REJECTED_BY_GRAMMAR = -2
"""What stands for the token of a row whose grammar takes none."""


def check_bitmask(bitmask: npt.NDArray[np.int32], num_rows: int, vocab_size: int) -> None:
    """Refuse a bitmask that is not int32 ``[num_rows, ceil(vocab_size / 32)]``.

    Raises:
        ValueError: names what it is and what it should be.
    """
    expected = (num_rows, -(-vocab_size // 32))
    if bitmask.dtype != np.int32 or bitmask.shape != expected:
        raise ValueError(
            f"a grammar bitmask must be int32 of shape {expected}, got {bitmask.dtype} of shape {bitmask.shape}"
        )


def apply_bitmask(logits: Tensor, bitmask: Tensor) -> None:
    """Make what a row's grammar does not take impossible, in place.

    A row that may take nothing keeps its logits: what is sampled there is no answer (``rejected_rows``).

    Args:
        logits: float ``[n, vocab_size]``.
        bitmask: int32 ``[n, ceil(vocab_size / 32)]`` on the same device; bit ``i % 32`` of word ``i // 32`` is for id
            ``i``.
    """
    vocab_size = logits.shape[-1]
    places = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    allowed = ((bitmask[:, :, None] >> places) & 1).flatten(1)[:, :vocab_size].to(torch.bool)
    allowed |= ~allowed.any(dim=-1, keepdim=True)
    logits.masked_fill_(~allowed, -torch.inf)


def rejected_rows(bitmask: npt.NDArray[np.int32], vocab_size: int) -> npt.NDArray[np.bool_]:
    """Rows that may take no id at all, bool ``[n]``."""
    words = bitmask
    if vocab_size % 32:
        words = bitmask.copy()
        words[:, -1] &= (1 << vocab_size % 32) - 1
    return np.asarray(~words.any(axis=1))
