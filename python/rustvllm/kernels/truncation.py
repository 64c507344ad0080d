"""Top-n-sigma, and top-k and top-p without sorting: a bitwise search finds the smallest logit that stays.

The bits of a float, slightly changed, are an integer with the same order. The threshold is the largest integer for
which at least ``k`` logits are not below it, or logits with at least ``p`` of the probability. Each pass over the row,
which is a small part of the device's cache, finds two bits. The result is exact: it is what sorting would give.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rustvllm.kernels.tuning import LAUNCH_OPTIONS, power_of_two

MAX_BLOCK = 4096


def apply_top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> None:
    """Keep, in place, the ``top_k`` largest logits, and of these the fewest whose probabilities reach ``top_p``.

    Logits that equal the smallest kept one are kept, too, so the order of equal logits never matters. A row's result
    depends only on the row. Rows with neither limit are not read.

    Args:
        logits: float32 ``[m, vocab_size]``, contiguous.
        top_k: int64 ``[m]``; 0 or less disables it.
        top_p: float32 ``[m]``; 1 or more disables it.
    """
    num_rows, vocab_size = logits.shape
    if not num_rows or (top_k is None and top_p is None):
        return
    # Always both, so that one kernel, compiled before the first request, serves top_k and top_p.
    top_k = torch.zeros(num_rows, dtype=torch.int64, device=logits.device) if top_k is None else top_k
    top_p = torch.ones(num_rows, dtype=torch.float32, device=logits.device) if top_p is None else top_p
    block = min(power_of_two(vocab_size), MAX_BLOCK)
    _truncate_kernel[(num_rows,)](
        logits,
        top_k,
        top_p,
        vocab_size,
        BLOCK=block,
        num_warps=max(1, min(16, block // 256)),
        **LAUNCH_OPTIONS,
    )


def apply_top_n_sigma(logits: Tensor, top_n_sigma: Tensor) -> None:
    """Drop, in place, logits that are more than ``top_n_sigma`` standard deviations below the largest one.

    A row's result depends only on the row. Rows without the filter are not read.

    Args:
        logits: float32 ``[m, vocab_size]``, contiguous.
        top_n_sigma: float32 ``[m]``; 0 or less disables it.
    """
    num_rows, vocab_size = logits.shape
    if not num_rows:
        return
    block = min(power_of_two(vocab_size), MAX_BLOCK // 2)  # there are three sums in float64: larger blocks would spill
    _top_n_sigma_kernel[(num_rows,)](
        logits,
        top_n_sigma,
        vocab_size,
        BLOCK=block,
        num_warps=max(1, min(16, block // 256)),
        **LAUNCH_OPTIONS,
    )


@triton.jit
def _top_n_sigma_kernel(logits_ptr, top_n_sigma_ptr, vocab_size, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    row = logits_ptr + index * vocab_size
    n = tl.load(top_n_sigma_ptr + index)
    if n > 0:
        largest = _logit(_highest_key(row, vocab_size, BLOCK)).to(tl.float64)
        count = tl.zeros((BLOCK,), tl.float64)
        total = tl.zeros((BLOCK,), tl.float64)
        squares = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, vocab_size, BLOCK):
            token = start + tl.arange(0, BLOCK)
            logit = tl.load(row + token, mask=token < vocab_size, other=float("-inf"))
            is_finite = logit != float("-inf")
            below = tl.where(is_finite, logit.to(tl.float64) - largest, 0.0)
            count += tl.where(is_finite, 1.0, 0.0)
            total += below
            squares += below * below
        num_finite = tl.sum(count, 0)
        mean = tl.sum(total, 0) / num_finite
        variance = tl.sum(squares, 0) / num_finite - mean * mean
        deviation = tl.sqrt(tl.where(variance > 0, variance, 0.0))
        threshold = (largest - n.to(tl.float64) * deviation).to(tl.float32)
        for start in range(0, vocab_size, BLOCK):
            token = start + tl.arange(0, BLOCK)
            logit = tl.load(row + token, mask=token < vocab_size, other=0.0)
            is_dropped = (token < vocab_size) & (logit < threshold)
            tl.store(row + token, tl.full((BLOCK,), float("-inf"), tl.float32), mask=is_dropped)


@triton.jit
def _truncate_kernel(
    logits_ptr,
    top_k_ptr,
    top_p_ptr,
    vocab_size,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = logits_ptr + index * vocab_size
    asked = tl.load(top_k_ptr + index)
    k = tl.where((asked > 0) & (asked < vocab_size), asked, vocab_size).to(tl.int32)
    p = tl.load(top_p_ptr + index)
    if (k < vocab_size) | (p < 1.0):
        highest = _highest_key(row, vocab_size, BLOCK)
        threshold = -2147483647 - 1
        if k < vocab_size:
            threshold = _threshold(row, vocab_size, k.to(tl.float32), highest, False, BLOCK)
        if p < 1.0:
            mass = _mass_of_k(row, vocab_size, k, threshold, highest, BLOCK)
            by_mass = _threshold(row, vocab_size, p * mass, highest, True, BLOCK)
            threshold = tl.maximum(threshold, tl.minimum(by_mass, highest))
        for start in range(0, vocab_size, BLOCK):
            token = start + tl.arange(0, BLOCK)
            logit = tl.load(row + token, mask=token < vocab_size, other=0.0)
            is_dropped = (token < vocab_size) & (_key(logit) < threshold)
            tl.store(row + token, tl.full((BLOCK,), float("-inf"), tl.float32), mask=is_dropped)


@triton.jit
def _key(logit):
    """Int32 in the order of the floats; both zeros have the same key."""
    bits = tl.where(logit == 0, 0.0, logit).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _logit(key):
    """The logit of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _highest_key(row, vocab_size, BLOCK: tl.constexpr):
    highest = tl.full((BLOCK,), -2147483647 - 1, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        highest = tl.maximum(highest, _key(tl.load(row + token, mask=token < vocab_size, other=float("-inf"))))
    return tl.max(highest, 0)


@triton.jit
def _threshold(row, vocab_size, target, highest, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key for which the number (or the mass) of the logits not below it reaches a target.

    Counts are floats, which are exact up to 2²⁴.
    """
    found = -2147483647 - 1
    step = 1 << 30
    top = _logit(highest)
    for _ in range(16):
        first = found + step
        second = first + step
        third = second + step
        reach_1 = tl.zeros((BLOCK,), tl.float32)
        reach_2 = tl.zeros((BLOCK,), tl.float32)
        reach_3 = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocab_size, BLOCK):
            token = start + tl.arange(0, BLOCK)
            logit = tl.load(row + token, mask=token < vocab_size, other=float("-inf"))
            key = _key(logit)
            weight = tl.where(token < vocab_size, 1.0, 0.0)
            if BY_MASS:
                weight = tl.exp(logit - top)
            reach_1 += tl.where(key >= first, weight, 0.0)
            reach_2 += tl.where(key >= second, weight, 0.0)
            reach_3 += tl.where(key >= third, weight, 0.0)
        found = tl.where(tl.sum(reach_1, 0) >= target, first, found)
        found = tl.where(tl.sum(reach_2, 0) >= target, second, found)
        found = tl.where(tl.sum(reach_3, 0) >= target, third, found)
        step = step >> 2
    return found


@triton.jit
def _mass_of_k(row, vocab_size, k, threshold, highest, BLOCK: tl.constexpr):
    """Mass of the ``k`` largest logits; of those that equal the smallest of them, only as many as ``k`` allows."""
    top = _logit(highest)
    above = tl.zeros((BLOCK,), tl.float32)
    num_above = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab_size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        logit = tl.load(row + token, mask=token < vocab_size, other=float("-inf"))
        is_above = (token < vocab_size) & (_key(logit) > threshold)
        above += tl.where(is_above, tl.exp(logit - top), 0.0)
        num_above += tl.where(is_above, 1, 0)
    mass = tl.sum(above, 0)
    num_equal = k - tl.sum(num_above, 0)
    return mass + tl.where(num_equal > 0, num_equal.to(tl.float32) * tl.exp(_logit(threshold) - top), 0.0)
