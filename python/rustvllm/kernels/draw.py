"""One token per row, by inverting the cumulative distribution at a number that depends on (seed, position) alone.

The number is that of ``rustvllm.sample.random.counter_uniform``, bit for bit, and the distribution is run through in
the order of the vocabulary, as ``rustvllm.sample.sampler`` does it: so a request draws here what it would draw there,
unless its number lies within rounding (about 1e-7 of the mass) of the border between two tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rustvllm.kernels.tuning import LAUNCH_OPTIONS, power_of_two

MAX_BLOCK = 2048
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


def counter_uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """One uniform number per pair; see ``rustvllm.sample.random.counter_uniform``.

    Args:
        seeds: int64 ``[n]``.
        positions: int64 ``[n]``.

    Returns:
        float64 ``[n]`` in ``[0, 1)``.
    """
    n = seeds.shape[0]
    out = torch.empty(n, dtype=torch.float64, device=seeds.device)
    if n:
        block = min(power_of_two(n), 256)
        _uniform_kernel[(triton.cdiv(n, block),)](out, seeds, positions, n, BLOCK=block, num_warps=4, **LAUNCH_OPTIONS)
    return out


def draw(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw one id per row from the softmax of its logits.

    A row without a finite distribution gives the id of its largest logit, the first of equals; −1 where there is none:
    it holds NaN, or nothing above −∞.

    Args:
        logits: float32 ``[m, vocab_size]``, contiguous; −∞ is never drawn.
        seeds: int64 ``[m]``.
        positions: int64 ``[m]``, of the token to be drawn in its own sequence.

    Returns:
        int64 ``[m]``.
    """
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        block = min(power_of_two(vocab_size), MAX_BLOCK)
        _draw_kernel[(num_rows,)](out, logits, seeds, positions, vocab_size, BLOCK=block, num_warps=8, **LAUNCH_OPTIONS)
    return out


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, position):
    state = _mix(seed.to(tl.uint64) + _GOLDEN)
    state = _mix(state ^ (position.to(tl.uint64) * _GOLDEN))
    state = _mix(state + _GOLDEN)
    return (state >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2⁻⁵³


@triton.jit(do_not_specialize=["n"])
def _uniform_kernel(out_ptr, seed_ptr, position_ptr, n, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_index = index < n
    seed = tl.load(seed_ptr + index, mask=is_index, other=0)
    position = tl.load(position_ptr + index, mask=is_index, other=0)
    tl.store(out_ptr + index, _uniform(seed, position), mask=is_index)


@triton.jit
def _draw_kernel(out_ptr, logits_ptr, seed_ptr, position_ptr, vocab_size, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    row = logits_ptr + index * vocab_size
    offset = tl.arange(0, BLOCK)

    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    num_nan = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab_size, BLOCK):
        token = start + offset
        logit = tl.load(row + token, mask=token < vocab_size, other=float("-inf"))
        top = tl.maximum(top, logit)
        num_nan += tl.where(logit != logit, 1, 0)
    highest = tl.max(top, 0)

    # An infinite or missing maximum makes every weight NaN or none, and no target is below such a total.
    total = tl.zeros((), tl.float64)
    first_top = tl.full((BLOCK,), 0, tl.int32) + vocab_size
    for start in range(0, vocab_size, BLOCK):
        token = start + offset
        logit = tl.load(row + token, mask=token < vocab_size, other=float("-inf"))
        total += tl.sum(tl.exp(logit - highest), 0).to(tl.float64)
        first_top = tl.minimum(first_top, tl.where((logit == highest) & (token < vocab_size), token, vocab_size))
    target = total * _uniform(tl.load(seed_ptr + index), tl.load(position_ptr + index))

    # The block at whose end the running sum is above the target for the first time, and the sum before it.
    running = tl.zeros((), tl.float64)
    before = running
    block_start = tl.zeros((), tl.int32)
    for start in range(0, vocab_size, BLOCK):
        token = start + offset
        logit = tl.load(row + token, mask=token < vocab_size, other=float("-inf"))
        is_beyond = running > target
        before = tl.where(is_beyond, before, running)
        block_start = tl.where(is_beyond, block_start, start)
        running += tl.sum(tl.exp(logit - highest), 0).to(tl.float64)
    token = block_start + offset
    weight = tl.exp(tl.load(row + token, mask=token < vocab_size, other=float("-inf")) - highest)
    inside = tl.sum(tl.where(before + tl.cumsum(weight.to(tl.float64), 0) <= target, 1, 0), 0)
    # Blocks and tokens are summed apart: what rounding leaves beyond the last possible token belongs to that.
    last = tl.max(tl.where(weight > 0, offset, 0), 0)
    drawn = block_start + tl.minimum(inside, last)

    token = tl.where(target < total, drawn, tl.min(first_top, 0))
    is_number = (highest > float("-inf")) & (tl.sum(num_nan, 0) == 0)
    tl.store(out_ptr + index, tl.where(is_number, token, -1).to(tl.int64))
