"""Everything between a layer's projection and its attention in one kernel: head norms, rotary positions, cache writes.

A program handles some heads of one token. It norms query and key heads, if the model does that, and rotates them.
Queries go to new memory, keys and values to their slots of the paged cache, unchanged or in 8 bits. Values are rounded
where the kernels of ``norm``, ``rotary`` and ``kv_write`` would round them, so that the result is the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rustvllm.kernels.fp8 import encode_e4m3
from rustvllm.kernels.tuning import LAUNCH_OPTIONS, power_of_two

HEADS_PER_PROGRAM = 4


def rotary_write(
    qkv: Tensor,
    num_heads: int,
    positions: Tensor,
    table: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    norm_weights: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    weight_offset: float = 0.0,
    is_by_head: bool = False,
) -> Tensor:
    """Norm and rotate queries and keys, and write keys and values whose slot is not −1.

    Args:
        qkv: ``[num_tokens, num_heads + 2 · num_kv_heads, head_dim]``: queries, keys, values; contiguous.
        num_heads: Number of query heads.
        positions: int32 ``[num_tokens]``, each below the table's length.
        table: ``[length, 2 · num_pairs]``, contiguous: the cosines and then the sines of each position's angles.
        kv_cache: ``[2, num_blocks, block_size, num_kv_heads, head_dim]``, contiguous; uint8 means e4m3.
        slot_mapping: int32 ``[num_tokens]`` or more.
        norm_weights: ``[head_dim]`` for queries and for keys, see ``norm.rms_norm``; None if heads are not normed.
        eps: Epsilon of the norms.
        weight_offset: Weight offset of the norms, see ``norm.rms_norm``.
        is_by_head: Whether ``qkv`` has query, key and value of one head after the other; there are as many of each.

    Returns:
        The queries, ``[num_tokens, num_heads, head_dim]``, in new memory.
    """
    num_tokens, num_all, head_dim = qkv.shape
    num_kv_heads = (num_all - num_heads) // 2
    num_pairs = table.shape[1] // 2
    query = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if not num_tokens:
        return query
    query_weight, key_weight = (qkv, qkv) if norm_weights is None else norm_weights
    rest = head_dim - 2 * num_pairs
    _rotary_write_kernel[(num_tokens, triton.cdiv(num_all, HEADS_PER_PROGRAM))](
        query,
        qkv,
        positions,
        table,
        kv_cache,
        slot_mapping,
        query_weight,
        key_weight,
        eps,
        weight_offset,
        table.shape[0] - 1,
        kv_cache.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        NUM_PAIRS=num_pairs,
        HEADS=HEADS_PER_PROGRAM,
        BLOCK=power_of_two(num_pairs),
        BLOCK_REST=power_of_two(rest) if rest else 1,
        HAS_NORM=norm_weights is not None,
        HAS_OFFSET=weight_offset != 0.0,
        IS_BY_HEAD=is_by_head,
        IS_FP8=kv_cache.dtype == torch.uint8,
        num_warps=2 if head_dim > 64 else 1,
        **LAUNCH_OPTIONS,
    )
    return query


@triton.jit
def _weights(query_weight_ptr, key_weight_ptr, feature, end, head, num_heads):
    """The norm weights of some features, for each head."""
    of_queries = tl.load(query_weight_ptr + feature, mask=feature < end, other=0.0)
    of_keys = tl.load(key_weight_ptr + feature, mask=feature < end, other=0.0)
    return tl.where((head < num_heads)[:, None], of_queries[None, :], of_keys[None, :])


@triton.jit
def _normed(x, scale, weight, weight_offset, HAS_OFFSET: tl.constexpr, dtype: tl.constexpr):
    """A part of some heads in float32, with known factors; rounded as in ``norm.rms_norm``."""
    if HAS_OFFSET:
        normed = x * scale[:, None] * (weight.to(tl.float32) + weight_offset)
    else:
        normed = weight * (x * scale[:, None]).to(dtype)
    return normed.to(dtype).to(tl.float32)


@triton.jit
def _stored(x, IS_FP8: tl.constexpr, dtype: tl.constexpr):
    """Float32 in the cache's dtype."""
    rounded = x.to(dtype)
    if IS_FP8:
        rounded = encode_e4m3(rounded.to(tl.float32))
    return rounded


@triton.jit(do_not_specialize=["last_position"], do_not_specialize_on_alignment=["position_ptr", "slot_ptr"])
def _rotary_write_kernel(
    query_ptr,
    qkv_ptr,
    position_ptr,
    table_ptr,
    cache_ptr,
    slot_ptr,
    query_weight_ptr,
    key_weight_ptr,
    eps,
    weight_offset,
    last_position,
    value_offset,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    IS_BY_HEAD: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    num_all: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    dtype = qkv_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    position = tl.minimum(tl.load(position_ptr + token), last_position).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_query = head < NUM_HEADS
    is_turned = head < NUM_HEADS + NUM_KV_HEADS
    is_head = head < num_all
    pair = tl.arange(0, BLOCK)
    is_pair = is_head[:, None] & (pair < NUM_PAIRS)[None, :]
    place = head
    if IS_BY_HEAD:
        place = (head % NUM_HEADS) * 3 + head // NUM_HEADS
    source = qkv_ptr + (token * num_all + place[:, None]) * HEAD_DIM
    a = tl.load(source + pair[None, :], mask=is_pair, other=0.0).to(tl.float32)
    b = tl.load(source + NUM_PAIRS + pair[None, :], mask=is_pair, other=0.0).to(tl.float32)
    if 2 * NUM_PAIRS < HEAD_DIM:
        beyond = 2 * NUM_PAIRS + tl.arange(0, BLOCK_REST)
        is_rest = is_head[:, None] & (beyond < HEAD_DIM)[None, :]
        rest = tl.load(source + beyond[None, :], mask=is_rest, other=0.0).to(tl.float32)

    if HAS_NORM:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if 2 * NUM_PAIRS < HEAD_DIM:
            squares += tl.sum(rest * rest, 1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)
        first = _weights(query_weight_ptr, key_weight_ptr, pair, NUM_PAIRS, head, NUM_HEADS)
        second = _weights(query_weight_ptr + NUM_PAIRS, key_weight_ptr + NUM_PAIRS, pair, NUM_PAIRS, head, NUM_HEADS)
        a = tl.where(is_turned[:, None], _normed(a, scale, first, weight_offset, HAS_OFFSET, dtype), a)
        b = tl.where(is_turned[:, None], _normed(b, scale, second, weight_offset, HAS_OFFSET, dtype), b)
        if 2 * NUM_PAIRS < HEAD_DIM:
            third = _weights(query_weight_ptr, key_weight_ptr, beyond, HEAD_DIM, head, NUM_HEADS)
            rest = tl.where(is_turned[:, None], _normed(rest, scale, third, weight_offset, HAS_OFFSET, dtype), rest)

    angles = table_ptr + position * (2 * NUM_PAIRS) + pair
    cos = tl.load(angles, mask=pair < NUM_PAIRS, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(angles + NUM_PAIRS, mask=pair < NUM_PAIRS, other=0.0).to(tl.float32)[None, :]
    turned_a = tl.where(is_turned[:, None], a * cos - b * sin, a)
    turned_b = tl.where(is_turned[:, None], b * cos + a * sin, b)

    query = query_ptr + (token * NUM_HEADS + head[:, None]) * HEAD_DIM
    to_query = is_pair & is_query[:, None]
    tl.store(query + pair[None, :], turned_a.to(dtype), mask=to_query)
    tl.store(query + NUM_PAIRS + pair[None, :], turned_b.to(dtype), mask=to_query)
    # After the query heads come the key heads and then the value heads, which belong into the cache's second half.
    kv_head = head - NUM_HEADS
    is_value = kv_head >= NUM_KV_HEADS
    half = tl.where(is_value, value_offset, 0).to(tl.int64)
    row = slot * NUM_KV_HEADS + tl.where(is_value, kv_head - NUM_KV_HEADS, kv_head)
    cache = cache_ptr + half[:, None] + row[:, None] * HEAD_DIM
    is_kept = (is_head & (kv_head >= tl.where(slot >= 0, 0, num_all)))[:, None]  # none if the slot is −1
    tl.store(cache + pair[None, :], _stored(turned_a, IS_FP8, dtype), mask=is_pair & is_kept)
    tl.store(cache + NUM_PAIRS + pair[None, :], _stored(turned_b, IS_FP8, dtype), mask=is_pair & is_kept)
    if 2 * NUM_PAIRS < HEAD_DIM:
        tl.store(query + beyond[None, :], rest.to(dtype), mask=is_rest & is_query[:, None])
        tl.store(cache + beyond[None, :], _stored(rest, IS_FP8, dtype), mask=is_rest & is_kept)
