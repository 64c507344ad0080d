"""Attention over the paged KV cache for ragged batches: one kernel for prompts, pieces of prompts and decodes.

A program computes a tile: the queries of some tokens of one request, for all heads that share a KV head (so that each
KV head is read once for all of them), against the keys that they may see, ``columns`` keys at a time, with an online
softmax in float32. It reads keys and values in place in the cache; nothing is gathered, and memory does not grow with
the context.

Tiles of keys begin at multiples of ``columns`` positions and are processed in ascending order, and a key that a query
may not see changes no bit of its sums. So a query's result depends only on its own request, on the tile's sizes and on
the number of parts into which its keys are split; the caller chooses all three.

With ``num_splits`` above 1, this many programs share a tile's keys, so that a few long sequences can fill a device. The
program that finishes last, according to a counter, combines the results of all, always in the same order. The memory
for this, rows times parts, is meant for few tiles.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rustvllm.kernels.fp8 import decode_e4m3
from rustvllm.kernels.tuning import (
    LAUNCH_OPTIONS,
    TileConfig,
    has_fp8_instructions,
    power_of_two,
)

MAX_HEAD_DIM = 256
MAX_SPLITS = 32
"""The most parts into which a sequence's keys are split."""
MIN_SPLIT_KEYS = 256
"""The fewest keys of a part: reading fewer takes less time than starting another program."""
_LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True)
class Tiles:
    """The programs to run, on the device.

    Attributes:
        requests: int32 ``[n]``, the request of each tile.
        first_tokens: int32 ``[n]``, the tile's first token, counted from the request's first new one.
        query_start_loc: int32 ``[num_reqs + 1]``.
        seq_lens: int32 ``[num_reqs]``; 0 for an unused row, whose output is zero.
        table_rows: int32 ``[num_reqs]``, each request's row of the block table.
    """

    requests: Tensor
    first_tokens: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    table_rows: Tensor


def tokens_per_tile(config: TileConfig, group_size: int) -> tuple[int, int]:
    """Tokens and rows of a tile; it has more rows than configured if more heads than that share a KV head."""
    rows = max(config.rows, power_of_two(group_size))
    return rows // group_size, rows


def paged_attention(
    out: Tensor,
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    tiles: Tiles,
    config: TileConfig,
    scale: float,
    *,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    num_splits: int = 1,
    counters: Tensor | None = None,
) -> None:
    """Compute attention and write the rows of the tiles' tokens.

    Args:
        out: ``[num_tokens, num_heads, head_dim]``, contiguous.
        query: The same shape; the features of a head are contiguous.
        kv_cache: ``[2, num_blocks, block_size, num_kv_heads, head_dim]``, contiguous, with the new tokens in it; uint8
            means e4m3.
        block_table: int32 ``[num_rows, max_blocks]``; a row's entries are contiguous.
        tiles: Made for ``tokens_per_tile(config, num_heads // num_kv_heads)``.
        config: The sizes of tiles.
        scale: Factor on the products of queries and keys.
        sliding_window: The most keys that a query sees, including its own; None: all.
        soft_cap: ``c`` in ``c · tanh(score / c)``; None disables this.
        alibi_slopes: float32 ``[num_heads]``; times the distance, subtracted from the score. None disables this.
        sinks: float32 ``[num_heads]``, contiguous: a further score of each head, without a value. None disables this.
        key_scale: Factor on 8-bit keys.
        value_scale: Factor on 8-bit values.
        num_splits: The number of parts into which keys are split.
        counters: int32, zeros before and after; with several parts, at least as many as tiles times KV heads. None if
            the caller never splits, so that the code for it is left out.

    Raises:
        ValueError: There are several parts and too few counters.
    """
    num_heads, head_dim = query.shape[1:]
    _, _, block_size, num_kv_heads, _ = kv_cache.shape
    group_size = num_heads // num_kv_heads
    num_tiles = tiles.requests.shape[0]
    if not num_tiles:
        return
    block_q, rows = tokens_per_tile(config, group_size)
    num_counters = 0 if counters is None else counters.shape[0]
    if num_splits > 1 and num_counters < num_tiles * num_kv_heads:
        raise ValueError(f"{num_tiles} tiles of {num_kv_heads} KV heads in parts need as many counters: {num_counters}")
    partial_out = partial_max = partial_sum = _nothing(out.device)
    if num_splits > 1:
        shape = (num_tiles * block_q, num_heads, num_splits)
        partial_out = torch.empty((*shape, head_dim), dtype=torch.float32, device=out.device)
        partial_max, partial_sum = torch.empty((2, *shape), dtype=torch.float32, device=out.device)
    head_dim_padded = max(16, power_of_two(head_dim))
    _attention_kernel[(num_tiles, num_kv_heads, num_splits)](
        out,
        partial_out,
        partial_max,
        partial_sum,
        tiles.requests if counters is None else counters,
        query,
        kv_cache,
        block_table,
        tiles.requests,
        tiles.first_tokens,
        tiles.query_start_loc,
        tiles.seq_lens,
        tiles.table_rows,
        _nothing(out.device) if alibi_slopes is None else alibi_slopes,
        _nothing(out.device) if sinks is None else sinks,
        scale * key_scale,
        0.0 if soft_cap is None else soft_cap,
        value_scale,
        0 if sliding_window is None else sliding_window,
        query.stride(0),
        query.stride(1),
        kv_cache.stride(0),
        block_table.stride(0),
        num_splits,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=head_dim_padded,
        NUM_KV_HEADS=num_kv_heads,
        GROUP_SIZE=group_size,
        BLOCK_SIZE=block_size,
        TILE_TOKENS=block_q,
        TILE_ROWS=rows,
        TILE_KEYS=config.columns,
        HAS_WINDOW=sliding_window is not None,
        HAS_SOFT_CAP=soft_cap is not None,
        HAS_ALIBI=alibi_slopes is not None,
        HAS_SINKS=sinks is not None,
        IS_FP8=kv_cache.dtype == torch.uint8,
        NATIVE_FP8=has_fp8_instructions(out.device),
        MIN_SPLIT_TILES=triton.cdiv(MIN_SPLIT_KEYS, config.columns),
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        MAY_SPLIT=counters is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **LAUNCH_OPTIONS,
    )


# Numbers that differ from step to step must not select the code: Triton would compile while requests wait.
_UNALIGNED = [
    "table_ptr",
    "request_ptr",
    "first_token_ptr",
    "query_start_ptr",
    "seq_len_ptr",
    "table_row_ptr",
    "partial_sum_ptr",
    "counter_ptr",
]


@functools.cache
def _nothing(device: torch.device) -> Tensor:
    """A placeholder for arrays that are not read; it has their dtype, so that the code is the same."""
    return torch.empty(1, dtype=torch.float32, device=device)


@triton.jit(do_not_specialize=["window", "table_stride", "num_splits"], do_not_specialize_on_alignment=_UNALIGNED)
def _attention_kernel(
    out_ptr,
    partial_out_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    counter_ptr,
    query_ptr,
    cache_ptr,
    table_ptr,
    request_ptr,
    first_token_ptr,
    query_start_ptr,
    seq_len_ptr,
    table_row_ptr,
    slope_ptr,
    sink_ptr,
    scale,
    soft_cap,
    value_scale,
    window,
    query_stride_token,
    query_stride_head,
    value_offset,
    table_stride,
    num_splits,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_FP8: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    MIN_SPLIT_TILES: tl.constexpr,
    PRECISION: tl.constexpr,
    MAY_SPLIT: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    request = tl.load(request_ptr + tile)
    first_token = tl.load(first_token_ptr + tile)
    start = tl.load(query_start_ptr + request)
    num_new = tl.load(query_start_ptr + request + 1) - start
    seq_len = tl.load(seq_len_ptr + request)
    num_computed = seq_len - num_new

    row = tl.arange(0, TILE_ROWS)
    token = first_token + row // GROUP_SIZE
    head = kv_head * GROUP_SIZE + row % GROUP_SIZE
    is_row = (row < TILE_TOKENS * GROUP_SIZE) & (token < num_new)
    position = num_computed + token
    feature = tl.arange(0, HEAD_DIM_PADDED)
    is_feature = feature < HEAD_DIM
    batch_token = (start + token).to(tl.int64)
    query = tl.load(
        query_ptr + batch_token[:, None] * query_stride_token + head[:, None] * query_stride_head + feature[None, :],
        mask=is_row[:, None] & is_feature[None, :],
        other=0.0,
    )
    if HAS_ALIBI:
        slope = tl.load(slope_ptr + head, mask=is_row, other=0.0)

    # Tiles of keys from the first one that the first token sees to the last one that the last token sees.
    num_visible = num_computed + tl.minimum(first_token + TILE_TOKENS, num_new)
    num_visible = tl.where(first_token < num_new, num_visible, 0)  # a tile beyond its request's tokens sees no keys
    first_tile = 0
    if HAS_WINDOW:
        first_tile = tl.maximum(num_computed + first_token - window + 1, 0) // TILE_KEYS
    end_tile = tl.cdiv(num_visible, TILE_KEYS)
    if MAY_SPLIT:
        tiles_per_split = tl.maximum(tl.cdiv(end_tile - first_tile, num_splits), MIN_SPLIT_TILES)
        tiles_per_split = tl.where(num_splits > 1, tiles_per_split, end_tile)
        first_tile = first_tile + tl.program_id(2) * tiles_per_split
        end_tile = tl.minimum(first_tile + tiles_per_split, end_tile)

    highest = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_ROWS,), tl.float32)
    if HAS_SINKS:  # counted once, by the part with the first keys
        sink = tl.load(sink_ptr + head, mask=is_row, other=0.0) * _LOG2_E
        highest = tl.where(tl.program_id(2) == 0, sink, highest)
        total = tl.where(tl.program_id(2) == 0, 1.0, total)
    acc = tl.zeros((TILE_ROWS, HEAD_DIM_PADDED), tl.float32)
    key_cache = cache_ptr + kv_head * HEAD_DIM
    value_cache = key_cache + value_offset
    table = table_ptr + tl.load(table_row_ptr + request).to(tl.int64) * table_stride
    for key_tile in range(first_tile, end_tile):
        key_position = key_tile * TILE_KEYS + tl.arange(0, TILE_KEYS)
        is_key = key_position < num_visible
        block = tl.load(table + key_position // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        slot = (block * BLOCK_SIZE + key_position % BLOCK_SIZE) * (NUM_KV_HEADS * HEAD_DIM)
        # Keys beyond the sequence may have any value, so they are never loaded.
        is_loaded = is_key[:, None] & is_feature[None, :]
        key = tl.load(key_cache + slot[:, None] + feature[None, :], mask=is_loaded, other=0)
        if IS_FP8:
            key = decode_e4m3(key, NATIVE_FP8).to(query.dtype)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        if HAS_SOFT_CAP:
            small = tl.exp(tl.abs(score) * (-2.0 / soft_cap))  # tanh of the magnitude, in a form that cannot overflow
            capped = soft_cap * (1.0 - small) / (1.0 + small)
            score = tl.where(score < 0, -capped, capped)
        if HAS_ALIBI:
            score += slope[:, None] * (key_position[None, :] - position[:, None]).to(tl.float32)
        is_seen = is_key[None, :] & (key_position[None, :] <= position[:, None])
        if HAS_WINDOW:
            is_seen = is_seen & (key_position[None, :] > position[:, None] - window)
        score = tl.where(is_seen, score * _LOG2_E, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(score, 1))
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # a row that has seen no key yet
        weight = tl.exp2(score - shift[:, None])
        decay = tl.exp2(highest - shift)
        total = total * decay + tl.sum(weight, 1)
        value = tl.load(value_cache + slot[:, None] + feature[None, :], mask=is_loaded, other=0)
        if IS_FP8:
            value = decode_e4m3(value, NATIVE_FP8).to(query.dtype)
        acc = acc * decay[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=PRECISION)
        highest = new_highest

    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP_SIZE
    is_whole = True
    if MAY_SPLIT:
        is_whole = num_splits == 1
        if num_splits > 1:
            first = ((tile.to(tl.int64) * TILE_TOKENS + row // GROUP_SIZE) * num_heads + head) * num_splits
            place = first + tl.program_id(2)
            tl.store(partial_max_ptr + place, highest, mask=is_row)
            tl.store(partial_sum_ptr + place, total, mask=is_row)
            # A part without keys adds 0; a NaN must propagate.
            is_stored = (is_row & (total != 0))[:, None] & is_feature[None, :]
            tl.store(partial_out_ptr + place[:, None] * HEAD_DIM + feature[None, :], acc, mask=is_stored)
            # All threads have stored before one of them counts; the one that counts last sees what all have stored.
            tl.debug_barrier()
            counter = counter_ptr + tile * NUM_KV_HEADS + kv_head
            is_whole = tl.atomic_add(counter, 1, sem="acq_rel") == num_splits - 1
            if is_whole:
                tl.store(counter, 0)
                highest = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
                for split in range(num_splits):
                    part_sum = tl.load(partial_sum_ptr + first + split, mask=is_row, other=0.0, cache_modifier=".cg")
                    part_max = tl.load(partial_max_ptr + first + split, mask=is_row, other=0.0, cache_modifier=".cg")
                    highest = tl.where(part_sum != 0, tl.maximum(highest, part_max), highest)
                shift = tl.where(highest == float("-inf"), 0.0, highest)
                total = tl.zeros((TILE_ROWS,), tl.float32)
                acc = tl.zeros((TILE_ROWS, HEAD_DIM_PADDED), tl.float32)
                for split in range(num_splits):
                    place = first + split
                    part_sum = tl.load(partial_sum_ptr + place, mask=is_row, other=0.0, cache_modifier=".cg")
                    part_max = tl.load(partial_max_ptr + place, mask=is_row, other=0.0, cache_modifier=".cg")
                    has_keys = is_row & (part_sum != 0)
                    weight = tl.where(has_keys, tl.exp2(part_max - shift), 0.0)
                    part = tl.load(
                        partial_out_ptr + place[:, None] * HEAD_DIM + feature[None, :],
                        mask=has_keys[:, None] & is_feature[None, :],
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    total += part_sum * weight
                    acc += part * weight[:, None]
    if is_whole:
        result = acc / tl.where(total == 0, 1.0, total)[:, None] * value_scale
        place = (batch_token * num_heads + head) * HEAD_DIM
        is_stored = is_row[:, None] & is_feature[None, :]
        tl.store(out_ptr + place[:, None] + feature[None, :], result.to(out_ptr.dtype.element_ty), mask=is_stored)
