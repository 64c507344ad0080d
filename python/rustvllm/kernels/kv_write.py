"""Writes the keys and values of a step's tokens into their slots of the paged cache, unchanged or in 8 bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rustvllm.kernels.fp8 import encode_e4m3
from rustvllm.kernels.tuning import LAUNCH_OPTIONS, power_of_two

MAX_BLOCK = 1024
"""The most elements of a token that one program writes."""


def kv_write(
    key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, key_scale: float = 1.0, value_scale: float = 1.0
) -> None:
    """Write the rows whose slot is not −1.

    Args:
        key: ``[num_tokens, num_kv_heads, head_dim]``; the features of a head are contiguous.
        value: Shaped like ``key``.
        kv_cache: ``[2, num_blocks, block_size, num_kv_heads, head_dim]``, contiguous; uint8 means e4m3.
        slot_mapping: int32 ``[num_tokens]`` or more.
        key_scale: Factor for reading 8-bit keys.
        value_scale: Factor for reading 8-bit values.
    """
    num_tokens, num_kv_heads, head_dim = key.shape
    if not num_tokens:
        return
    row_size = num_kv_heads * head_dim
    block = min(power_of_two(row_size), MAX_BLOCK)
    _kv_write_kernel[(num_tokens, triton.cdiv(row_size, block))](
        key,
        value,
        kv_cache,
        slot_mapping,
        1.0 / key_scale,
        1.0 / value_scale,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        kv_cache.stride(0),
        ROW_SIZE=row_size,
        HEAD_DIM=head_dim,
        BLOCK=block,
        IS_FP8=kv_cache.dtype == torch.uint8,
        num_warps=4 if block >= 512 else 1,
        **LAUNCH_OPTIONS,
    )


@triton.jit(do_not_specialize_on_alignment=["slot_ptr"])
def _kv_write_kernel(
    key_ptr,
    value_ptr,
    cache_ptr,
    slot_ptr,
    key_factor,
    value_factor,
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    value_offset,
    ROW_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = element < tl.where(slot >= 0, ROW_SIZE, 0)
    head = element // HEAD_DIM
    feature = element % HEAD_DIM
    key = tl.load(key_ptr + token * key_stride_token + head * key_stride_head + feature, mask=kept, other=0)
    value = tl.load(value_ptr + token * value_stride_token + head * value_stride_head + feature, mask=kept, other=0)
    target = cache_ptr + slot * ROW_SIZE + element
    if IS_FP8:
        tl.store(target, encode_e4m3(key.to(tl.float32) * key_factor), mask=kept)
        tl.store(target + value_offset, encode_e4m3(value.to(tl.float32) * value_factor), mask=kept)
    else:
        tl.store(target, key, mask=kept)
        tl.store(target + value_offset, value, mask=kept)
