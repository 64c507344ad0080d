"""Repetition, frequency and presence penalties, from counts that are updated from step to step."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rustvllm.kernels.tuning import LAUNCH_OPTIONS, power_of_two

MAX_BLOCK = 1024


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    slots: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    output_counts: Tensor,
    prompt_mask: Tensor,
) -> None:
    """Penalize some rows of the logits in place, reading each once.

    Repetition counts prompt and output: it divides a positive logit, and multiplies any other. Frequency is then
    subtracted once per earlier occurrence of the id, and presence once if there was any; both consider only the output.

    Args:
        logits: float32 ``[n, vocab_size]``, contiguous.
        rows: int64 ``[p]``, indices of the rows.
        slots: int64 ``[p]``, the index of each row's counts.
        presence: float32 ``[p]``.
        frequency: float32 ``[p]``.
        repetition: float32 ``[p]``.
        output_counts: int32 ``[capacity, vocab_size]``, contiguous.
        prompt_mask: bool ``[capacity, vocab_size]``, contiguous.
    """
    vocab_size = logits.shape[1]
    if not rows.shape[0]:
        return
    block = min(power_of_two(vocab_size), MAX_BLOCK)
    _penalties_kernel[(rows.shape[0], triton.cdiv(vocab_size, block))](
        logits,
        rows,
        slots,
        presence,
        frequency,
        repetition,
        output_counts,
        prompt_mask,
        vocab_size,
        BLOCK=block,
        num_warps=4,
        **LAUNCH_OPTIONS,
    )


@triton.jit
def _penalties_kernel(
    logits_ptr,
    row_ptr,
    slot_ptr,
    presence_ptr,
    frequency_ptr,
    repetition_ptr,
    count_ptr,
    prompt_ptr,
    vocab_size,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < vocab_size
    place = logits_ptr + tl.load(row_ptr + index) * vocab_size + token
    logit = tl.load(place, mask=is_token, other=0.0)
    counted = tl.load(slot_ptr + index) * vocab_size + token
    count = tl.load(count_ptr + counted, mask=is_token, other=0)
    in_prompt = tl.load(prompt_ptr + counted, mask=is_token, other=0)
    repetition = tl.load(repetition_ptr + index)
    is_there = (count > 0) | (in_prompt != 0)
    repeated = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
    logit = tl.where(is_there, repeated, logit)
    logit -= tl.load(frequency_ptr + index) * count.to(tl.float32)
    logit -= tl.where(count > 0, tl.load(presence_ptr + index), 0.0)
    tl.store(place, logit, mask=is_token)
