"""Each kernel's work in plain torch: slow, written to be read, with the kernels' signatures."""

from __future__ import annotations

import torch
from torch import Tensor

from rustvllm.kernels.fp8 import MAX as FP8_MAX


def encode_e4m3(x: Tensor) -> Tensor:
    """Numbers to e4m3 in uint8: to the nearest, ties to even, what is beyond ±448 becomes ±448."""
    x = x.to(torch.float32)
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e4m3(code: Tensor) -> Tensor:
    """E4m3 in uint8 to float32."""
    return code.view(torch.float8_e4m3fn).to(torch.float32)


def kv_write(
    key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, key_scale: float = 1.0, value_scale: float = 1.0
) -> None:
    """See ``kv_write.kv_write``."""
    flat = kv_cache.view(2, -1, *key.shape[1:])
    for token, slot in enumerate(slot_mapping[: key.shape[0]].tolist()):
        if slot < 0:
            continue
        for part, (new, factor) in enumerate(((key, key_scale), (value, value_scale))):
            is_fp8 = kv_cache.dtype == torch.uint8
            row = encode_e4m3(new[token].float() * (1.0 / factor)) if is_fp8 else new[token]
            flat[part, slot] = row


def paged_attention(
    out: Tensor,
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """See ``paged_attention.paged_attention``; request by request, in float64."""
    num_kv_heads, head_dim = kv_cache.shape[-2:]
    block_size = kv_cache.shape[2]
    group_size = query.shape[1] // num_kv_heads
    flat = kv_cache.view(2, -1, num_kv_heads, head_dim)
    for request, seq_len in enumerate(seq_lens.tolist()):
        start, end = query_start_loc[request : request + 2].tolist()
        key_positions = torch.arange(seq_len, device=query.device)
        blocks = block_table[request, key_positions // block_size].long()
        parts = flat[:, blocks * block_size + key_positions % block_size]
        parts = decode_e4m3(parts) if kv_cache.dtype == torch.uint8 else parts
        keys, values = (part.double().repeat_interleave(group_size, 1) for part in parts)  # [S, H, D]
        keys, values = keys * key_scale, values * value_scale
        positions = torch.arange(seq_len - (end - start), seq_len, device=query.device)
        scores = torch.einsum("qhd,khd->hqk", query[start:end].double(), keys) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        distances = positions[:, None] - key_positions
        if alibi_slopes is not None:
            scores = scores - alibi_slopes.double()[:, None, None] * distances
        is_seen = distances >= 0
        if sliding_window is not None:
            is_seen &= distances < sliding_window
        weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
