"""Paged attention in plain torch: runs everywhere, and is what every faster backend is compared with.

Rows with one new token (decode) are attended together: their keys and values are gathered through the block table into
padded tensors, a bounded number of bytes at a time. Rows with several new tokens (prefill, chunks of it) are attended
one request at a time, a bounded number of queries at a time.

Slots that were never written, or hold another request's remains, cannot reach a result: a gather reads slot 0 of the
null block, which always holds zeros, for every position beyond a sequence, and the mask drops it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rustvllm.attention.metadata import AttentionMetadata, KVCacheSpec

MAX_GATHER_BYTES = 64 << 20
"""Most bytes of keys and values that one decode chunk gathers (a single longer row is still gathered whole)."""
MAX_MASK_ELEMENTS = 1 << 24
"""Most query-key pairs of one prefill chunk whose mask is spelled out."""


class TorchAttentionBackend:
    """See the module.

    Args:
        spec: shape of the cache.
        dtype: of the cache.
        max_gather_bytes: bound on a decode chunk; tests make it small.
        max_mask_elements: bound on a prefill chunk; tests make it small.
    """

    name = "torch"

    def __init__(
        self,
        spec: KVCacheSpec,
        dtype: torch.dtype,
        *,
        max_gather_bytes: int = MAX_GATHER_BYTES,
        max_mask_elements: int = MAX_MASK_ELEMENTS,
    ) -> None:
        bytes_per_slot = 2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize
        self.max_gather_slots = max(1, max_gather_bytes // bytes_per_slot)
        self.max_mask_elements = max_mask_elements

    def plan(self, metadata: AttentionMetadata) -> TorchAttentionPlan:
        """Split the step into decode chunks and prefill spans; see ``AttentionBackend.plan``."""
        return TorchAttentionPlan(metadata, self.max_gather_slots, self.max_mask_elements)


@dataclass(frozen=True, slots=True)
class _DecodeChunk:
    tokens: Tensor  # int64 [rows], index into the flattened batch
    slots: Tensor  # int64 [rows, longest]
    mask: Tensor  # bool [rows, 1, 1, longest]


@dataclass(frozen=True, slots=True)
class _PrefillSpan:
    start: int  # first token in the flattened batch
    end: int
    num_computed: int  # tokens of the request that were cached before
    slots: Tensor  # int64 [num_computed + end - start]


class TorchAttentionPlan:
    """One step's chunks and spans; see ``AttentionPlan``."""

    def __init__(self, metadata: AttentionMetadata, max_gather_slots: int, max_mask_elements: int) -> None:
        self._max_mask_elements = max_mask_elements
        slot_mapping = metadata.slot_mapping.to(torch.int64)
        self._kept = torch.nonzero(slot_mapping >= 0)[:, 0] if metadata.has_padding else None
        self._slot_mapping = slot_mapping if self._kept is None else slot_mapping[self._kept]

        query_lens = np.diff(metadata.query_start_loc)
        self._decode = _decode_chunks(metadata, np.flatnonzero(query_lens == 1), max_gather_slots)
        self._prefill = [_prefill_span(metadata, int(i)) for i in np.flatnonzero(query_lens > 1)]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, scale: float) -> Tensor:
        """See ``AttentionPlan.forward``."""
        num_kv_heads, head_dim = kv_cache.shape[-2:]
        keys, values = kv_cache.view(2, -1, num_kv_heads * head_dim)  # each [num_slots, KVH * D]
        self._write(keys, key)
        self._write(values, value)
        out = torch.empty_like(query)
        for chunk in self._decode:
            out[chunk.tokens] = _attend_decode(query[chunk.tokens], keys, values, chunk, num_kv_heads, scale)
        for span in self._prefill:
            self._attend_prefill(out, query, keys, values, span, num_kv_heads, scale)
        return out

    def _write(self, cache: Tensor, new: Tensor) -> None:
        rows = new.flatten(1)
        if self._kept is not None:
            rows = rows[self._kept]
        cache.index_copy_(0, self._slot_mapping, rows)

    def _attend_prefill(
        self,
        out: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        span: _PrefillSpan,
        num_kv_heads: int,
        scale: float,
    ) -> None:
        num_heads, head_dim = query.shape[1:]
        seq_len = span.slots.shape[0]
        k = F.embedding(span.slots, keys).view(1, seq_len, num_kv_heads, head_dim).transpose(1, 2)  # [1, KVH, S, D]
        v = F.embedding(span.slots, values).view(1, seq_len, num_kv_heads, head_dim).transpose(1, 2)
        gqa = num_heads != num_kv_heads
        if span.num_computed == 0:
            q = query[span.start : span.end].transpose(0, 1)[None]  # [1, H, n, D]
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
            out[span.start : span.end] = o[0].transpose(0, 1)
            return
        rows = max(1, self._max_mask_elements // seq_len)
        for start in range(span.start, span.end, rows):
            end = min(start + rows, span.end)
            first = span.num_computed + start - span.start  # position of the chunk's first query
            visible = first + end - start
            positions = torch.arange(first, visible, device=query.device)
            mask = torch.arange(visible, device=query.device)[None, :] <= positions[:, None]  # [n, visible]
            q = query[start:end].transpose(0, 1)[None]
            o = F.scaled_dot_product_attention(
                q, k[:, :, :visible], v[:, :, :visible], attn_mask=mask, scale=scale, enable_gqa=gqa
            )
            out[start:end] = o[0].transpose(0, 1)


def _attend_decode(
    query: Tensor, keys: Tensor, values: Tensor, chunk: _DecodeChunk, num_kv_heads: int, scale: float
) -> Tensor:
    rows, num_heads, head_dim = query.shape
    longest = chunk.slots.shape[1]
    # F.embedding is a gather of rows, many times faster on CPU than index_select.
    k = F.embedding(chunk.slots, keys).view(rows, longest, num_kv_heads, head_dim).transpose(1, 2)
    v = F.embedding(chunk.slots, values).view(rows, longest, num_kv_heads, head_dim).transpose(1, 2)
    # The query heads that share a KV head see the same keys, so they stand where queries of one sequence would.
    q = query.view(rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=chunk.mask, scale=scale)
    return o.reshape(rows, num_heads, head_dim)


def _decode_chunks(metadata: AttentionMetadata, rows: np.ndarray, max_gather_slots: int) -> list[_DecodeChunk]:
    device = metadata.block_table.device
    lens = metadata.seq_lens[rows]
    order = np.argsort(-lens, kind="stable")  # rows of like length together: little padding
    rows, lens = rows[order], lens[order]
    chunks = []
    begin = 0
    while begin < len(rows):
        longest = int(lens[begin])
        end = min(len(rows), begin + max(1, max_gather_slots // longest))
        chunk_rows = torch.from_numpy(rows[begin:end]).to(device)
        chunk_lens = torch.from_numpy(lens[begin:end].astype(np.int64)).to(device)
        tokens = torch.from_numpy(metadata.query_start_loc[rows[begin:end]].astype(np.int64)).to(device)
        valid = torch.arange(longest, device=device)[None, :] < chunk_lens[:, None]
        slots = torch.where(valid, _slots(metadata, chunk_rows, longest), 0)
        chunks.append(_DecodeChunk(tokens, slots, valid[:, None, None, :]))
        begin = end
    return chunks


def _prefill_span(metadata: AttentionMetadata, row: int) -> _PrefillSpan:
    start, end = int(metadata.query_start_loc[row]), int(metadata.query_start_loc[row + 1])
    seq_len = int(metadata.seq_lens[row])
    rows = torch.tensor([row], device=metadata.block_table.device)
    return _PrefillSpan(start, end, seq_len - (end - start), _slots(metadata, rows, seq_len)[0])


def _slots(metadata: AttentionMetadata, rows: Tensor, length: int) -> Tensor:
    """Slots of positions ``0 .. length`` of some requests, int64 ``[len(rows), length]``; stale beyond a sequence."""
    block_size = metadata.block_size
    num_blocks = -(-length // block_size)
    blocks = metadata.block_table[rows, :num_blocks].to(torch.int64)
    offsets = torch.arange(block_size, device=blocks.device)
    return (blocks[:, :, None] * block_size + offsets).flatten(1)[:, :length]
