"""Repetition, frequency and presence penalties from counts of a request's tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from rustvllm.layers.fused import runs_fused
from rustvllm.sample.metadata import Penalties


def apply_penalties(logits: Tensor, penalties: Penalties) -> None:
    """Penalize some rows of the logits in place.

    Repetition counts prompt and output: it divides a positive logit, and multiplies any other. Frequency is then
    subtracted once per earlier occurrence of the id, and presence once if there was any; both consider only the output.

    Args:
        logits: float32 ``[n, vocab_size]``.
        penalties: The rows and their penalties.
    """
    if runs_fused(logits) and logits.is_contiguous():
        from rustvllm.kernels import penalties as kernel

        p = penalties
        numbers = (p.presence, p.frequency, p.repetition)
        kernel.apply_penalties(logits, p.rows, p.slots, *numbers, p.output_counts, p.prompt_mask)
        return
    rows = logits[penalties.rows]
    output_counts = penalties.output_counts[penalties.slots]
    generated = output_counts > 0
    repetition = torch.where(generated | penalties.prompt_mask[penalties.slots], penalties.repetition[:, None], 1.0)
    rows = torch.where(rows > 0, rows / repetition, rows * repetition)
    rows -= penalties.frequency[:, None] * output_counts
    rows -= penalties.presence[:, None] * generated
    logits[penalties.rows] = rows
