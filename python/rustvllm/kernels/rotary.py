"""Rotary positions: rotates pairs of a head's features, some or all of them, by a position's angles."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rustvllm.kernels.tuning import LAUNCH_OPTIONS, power_of_two


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the first ``2 · num_pairs`` features of every head; the others are copied.

    Args:
        x: ``[num_tokens, num_heads, head_dim]``; the features of a head are contiguous.
        cos: ``[num_tokens, num_pairs]``, for each position's angles; those of a token are contiguous.
        sin: The same shape and strides.
        interleaved: Whether a pair is features ``2 i`` and ``2 i + 1`` (GPT-J) and not ``i`` and ``i + num_pairs``
            (NeoX).

    Returns:
        A new, contiguous tensor shaped like ``x``, computed in float32.
    """
    num_tokens, num_heads, head_dim = x.shape
    num_pairs = cos.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    heads = power_of_two(num_heads)
    block = power_of_two(max(head_dim - 2 * num_pairs, num_pairs))
    _rotary_kernel[(num_tokens,)](
        out,
        x,
        cos,
        sin,
        x.stride(0),
        x.stride(1),
        cos.stride(0),
        NUM_HEADS=num_heads,
        HEADS=heads,
        HEAD_DIM=head_dim,
        NUM_PAIRS=num_pairs,
        BLOCK=block,
        INTERLEAVED=interleaved,
        num_warps=max(1, min(8, heads * block // 512)),
        **LAUNCH_OPTIONS,
    )
    return out


@triton.jit
def _rotary_kernel(
    out_ptr,
    x_ptr,
    cos_ptr,
    sin_ptr,
    stride_token,
    stride_head,
    stride_angles,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    is_pair = (head < NUM_HEADS) & (pair < NUM_PAIRS)
    cos = tl.load(cos_ptr + token * stride_angles + pair, mask=pair < NUM_PAIRS, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * stride_angles + pair, mask=pair < NUM_PAIRS, other=0.0).to(tl.float32)
    if INTERLEAVED:
        first = 2 * pair
        second = 2 * pair + 1
    else:
        first = pair
        second = pair + NUM_PAIRS
    source = x_ptr + token * stride_token + head * stride_head
    target = out_ptr + (token * NUM_HEADS + head) * HEAD_DIM
    a = tl.load(source + first, mask=is_pair, other=0.0).to(tl.float32)
    b = tl.load(source + second, mask=is_pair, other=0.0).to(tl.float32)
    tl.store(target + first, (a * cos - b * sin).to(out_ptr.dtype.element_ty), mask=is_pair)
    tl.store(target + second, (b * cos + a * sin).to(out_ptr.dtype.element_ty), mask=is_pair)
    if 2 * NUM_PAIRS < HEAD_DIM:
        rest = 2 * NUM_PAIRS + pair
        is_rest = (head < NUM_HEADS) & (rest < HEAD_DIM)
        tl.store(target + rest, tl.load(source + rest, mask=is_rest, other=0.0), mask=is_rest)
