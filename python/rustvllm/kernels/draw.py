"""Chooses one token per row: the largest logit, or a draw that inverts the cumulative distribution.

A draw's uniform number depends only on (seed, position). It is that of ``rustvllm.sample.random.counter_uniform``, bit
for bit, and the distribution is traversed in the order of the vocabulary, as in ``rustvllm.sample.sampler``. So a
request draws the same token here and there, unless its number is within rounding (about 1e-7 of the mass) of the border
between two tokens.

A row's vocabulary is divided into parts of equal size, which are read in parallel. The program that finishes last,
according to a counter, chooses among the parts, and reads the part with the token again. So a row's token depends only
on that row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rustvllm.kernels.tuning import LAUNCH_OPTIONS, power_of_two

PART, BLOCK = 4096, 1024
"""Ids of a part, and ids that are read at a time; the first is a multiple of the second."""
NO_TOKEN, NOTHING_LEFT = -1, -8
"""Defined in ``sample.sampler``."""
_NO_TOKEN, _NOTHING_LEFT = tl.constexpr(NO_TOKEN), tl.constexpr(NOTHING_LEFT)
_GREEDY_TEMPERATURE = tl.constexpr(1e-5)  # defined in ``sample.metadata``
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

    A row without a finite distribution gives the id of its largest logit, the first of equals; ``NO_TOKEN`` if it
    contains NaN, and ``NOTHING_LEFT`` if it contains nothing above −∞.

    Args:
        logits: float32 ``[m, vocab_size]``, contiguous; −∞ is never drawn.
        seeds: int64 ``[m]``.
        positions: int64 ``[m]``, the position of the drawn token in its own sequence.

    Returns:
        int64 ``[m]``.
    """
    out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    _choose(out, logits, "drawn", seeds=seeds, positions=positions)
    return out


def argmax(logits: Tensor) -> Tensor:
    """The id of the largest logit of each row, the first of equals; without one, the same codes as ``draw``.

    Args:
        logits: float ``[m, vocab_size]``, contiguous.

    Returns:
        int64 ``[m]``.
    """
    out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    _choose(out, logits, "greedy")
    return out


@dataclass(frozen=True, slots=True)
class StaticDraws:
    """The inputs and outputs of ``choose`` other than logits, in memory with fixed addresses.

    Attributes:
        temperatures: float32 ``[n]``; a row with a temperature below 1e-5 takes its largest logit.
        seeds: int32 ``[2, n]``, or rows of a wider array: the lower and then the upper halves of int64 numbers.
        positions: int32 ``[n]``, the position of each chosen token in its own sequence.
        rows: int32 ``[n]``, the index of each token in ``last_token_ids``.
        which: int32 ``[1]`` or more: the row of ``sampled`` that is written.
        sampled: int32 ``[num_sets, n]`` or wider.
        last_token_ids: int32, receives each token, or 0 if there is none; None disables this.
        counters: int32 ``[n]`` or more, zeros before and after.
    """

    temperatures: Tensor
    seeds: Tensor
    positions: Tensor
    rows: Tensor
    which: Tensor
    sampled: Tensor
    last_token_ids: Tensor | None
    counters: Tensor


def choose(logits: Tensor, draws: StaticDraws) -> None:
    """Choose the token of each row, as ``draw`` does after the temperature, and write it to fixed memory.

    Args:
        logits: float ``[n, vocab_size]``, contiguous.
        draws: The other inputs, and the outputs.
    """
    _choose(draws.sampled, logits, "each", draws=draws)


def _choose(
    out: Tensor,
    logits: Tensor,
    kind: str,
    *,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    draws: StaticDraws | None = None,
) -> None:
    num_rows, vocab_size = logits.shape
    if not num_rows:
        return
    num_parts = triton.cdiv(vocab_size, PART)
    device = logits.device
    counters = torch.zeros(num_rows, dtype=torch.int32, device=device) if draws is None else draws.counters
    part_values = torch.empty((2, num_rows, num_parts), dtype=torch.float64, device=device)
    part_ids = torch.empty((num_rows, num_parts), dtype=torch.int32, device=device)
    nothing = part_ids
    _draw_kernel[(num_rows, num_parts)](
        out,
        logits,
        nothing if seeds is None else seeds,
        nothing if positions is None else positions,
        part_values[0],
        part_values[1],
        part_ids,
        counters,
        nothing if draws is None else draws.temperatures,
        nothing if draws is None else draws.seeds[0],
        nothing if draws is None else draws.seeds[1],
        nothing if draws is None else draws.positions,
        nothing if draws is None else draws.rows,
        nothing if draws is None else draws.which,
        nothing if draws is None or draws.last_token_ids is None else draws.last_token_ids,
        vocab_size,
        0 if draws is None else out.stride(0),
        num_parts,
        KIND=kind,
        HAS_LAST=draws is not None and draws.last_token_ids is not None,
        PART=PART,
        BLOCK=BLOCK,
        PARTS=power_of_two(num_parts),
        num_warps=4,
        **LAUNCH_OPTIONS,
    )


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
def _score(row, token, end, temperature, HAS_TEMPERATURE: tl.constexpr):
    """Logits in float32 after the temperature; −∞ from ``end`` on."""
    logit = tl.load(row + token, mask=token < end, other=float("-inf")).to(tl.float32)
    if HAS_TEMPERATURE:
        logit = tl.div_rn(logit, temperature)
    return logit


_UNALIGNED = [
    "seed_ptr", "position_ptr", "max_ptr", "sum_ptr", "id_ptr", "counter_ptr", "temperature_ptr", "seed_low_ptr",
    "seed_high_ptr", "static_position_ptr", "row_ptr", "which_ptr",
]  # fmt: skip


# The number of rows must not select the code; some of the arrays begin inside a larger one.
@triton.jit(do_not_specialize=["out_stride"], do_not_specialize_on_alignment=_UNALIGNED)
def _draw_kernel(
    out_ptr,
    logits_ptr,
    seed_ptr,
    position_ptr,
    max_ptr,
    sum_ptr,
    id_ptr,
    counter_ptr,
    temperature_ptr,
    seed_low_ptr,
    seed_high_ptr,
    static_position_ptr,
    row_ptr,
    which_ptr,
    last_ptr,
    vocab_size,
    out_stride,
    num_parts,
    KIND: tl.constexpr,
    HAS_LAST: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row = logits_ptr + index * vocab_size
    offset = tl.arange(0, BLOCK)
    end = tl.minimum((part + 1) * PART, vocab_size)
    has_temperature: tl.constexpr = KIND == "each"
    is_drawn = KIND == "drawn"
    temperature = 1.0
    if has_temperature:
        temperature = tl.load(temperature_ptr + index)
        is_drawn = temperature >= _GREEDY_TEMPERATURE
        temperature = tl.where(is_drawn, temperature, 1.0)

    # Each lane's largest score, its first id, and the sum of all weights relative to it.
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    first = tl.full((BLOCK,), 0, tl.int32) + vocab_size
    total = tl.zeros((BLOCK,), tl.float32)
    num_nan = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, PART, BLOCK):
        token = part * PART + start + offset
        score = _score(row, token, end, temperature, has_temperature)
        num_nan += tl.where(score != score, 1, 0)
        first = tl.where(score > highest, token, first)
        larger = tl.maximum(highest, score)
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        if KIND != "greedy":
            total = total * tl.exp(highest - shift) + tl.exp(score - shift)
        highest = larger
    part_max = tl.max(highest, 0)
    part_first = tl.min(tl.where(highest == part_max, first, vocab_size), 0)
    # If the largest is infinite, the sum is NaN, and no target is below it.
    shift = tl.where(part_max == float("-inf"), 0.0, part_max)
    part_sum = tl.sum((total * tl.exp(highest - shift)).to(tl.float64), 0)
    place = index * num_parts + part
    tl.store(max_ptr + place, part_max.to(tl.float64))
    tl.store(sum_ptr + place, part_sum)
    tl.store(id_ptr + place, tl.where(tl.sum(num_nan, 0) > 0, _NO_TOKEN, part_first))
    # The thread that stored also counts afterwards; the one that counts last sees what all have stored.
    tl.debug_barrier()
    if tl.atomic_add(counter_ptr + index, 1, sem="acq_rel") == num_parts - 1:
        tl.store(counter_ptr + index, 0)
        which = tl.arange(0, PARTS)
        is_part = which < num_parts
        places = index * num_parts + which
        maxima = tl.load(max_ptr + places, mask=is_part, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(sum_ptr + places, mask=is_part, other=0.0, cache_modifier=".cg")
        firsts = tl.load(id_ptr + places, mask=is_part, other=vocab_size, cache_modifier=".cg")
        top = tl.max(maxima, 0)
        chosen = tl.min(tl.where(maxima == top, firsts, vocab_size), 0)
        has_nan = tl.min(firsts, 0) < 0
        is_number = (top > float("-inf")) & (not has_nan)
        # Chosen before the draw and not after it, because values that live through the draw occupy registers.
        chosen = tl.where(is_number, chosen, tl.where(has_nan, _NO_TOKEN, _NOTHING_LEFT))
        if is_drawn & is_number:
            # Parts without a possible token weigh nothing.
            weights = tl.where(maxima > float("-inf"), sums * tl.exp((maxima - top).to(tl.float32)).to(tl.float64), 0.0)
            running = tl.cumsum(weights, 0)
            all_weight = tl.max(tl.where(is_part, running, 0.0), 0)
            if has_temperature:
                low = tl.load(seed_low_ptr + index).to(tl.uint32, bitcast=True).to(tl.uint64)
                high = tl.load(seed_high_ptr + index).to(tl.uint32, bitcast=True).to(tl.uint64)
                uniform = _uniform(low | (high << 32), tl.load(static_position_ptr + index))
            else:
                uniform = _uniform(tl.load(seed_ptr + index), tl.load(position_ptr + index))
            target = all_weight * uniform
            if target < all_weight:
                # The first part whose running sum exceeds the target, the sum before it, and its tokens.
                mine = tl.min(tl.where((running > target) & is_part, which, PARTS), 0)
                before = tl.max(tl.where(which < mine, running, 0.0), 0)
                unit = tl.sum(tl.where(which == mine, weights / tl.where(sums > 0, sums, 1.0), 0.0), 0)
                part_top = tl.max(tl.where(which == mine, maxima, float("-inf")), 0).to(tl.float32)
                end = tl.minimum((mine + 1) * PART, vocab_size)
                found = vocab_size
                last = mine * PART
                for start in range(0, PART, BLOCK):
                    token = mine * PART + start + offset
                    weight = tl.exp(_score(row, token, end, temperature, has_temperature) - part_top)
                    weight = weight.to(tl.float64) * unit
                    inside = before + tl.cumsum(weight, 0)
                    is_beyond = (inside > target) & (weight > 0)
                    found = tl.minimum(found, tl.min(tl.where(is_beyond, token, vocab_size), 0))
                    last = tl.maximum(last, tl.max(tl.where(weight > 0, token, 0), 0))
                    before += tl.sum(weight, 0)
                # Parts and tokens are summed separately; if rounding passes the last possible token, that one is taken.
                chosen = tl.where(found < vocab_size, found, last)
        target_ptr = out_ptr + index
        if has_temperature:
            target_ptr += tl.load(which_ptr).to(tl.int64) * out_stride
        tl.store(target_ptr, chosen.to(out_ptr.dtype.element_ty))
        if HAS_LAST:
            tl.store(last_ptr + tl.load(row_ptr + index), tl.maximum(chosen, 0))
