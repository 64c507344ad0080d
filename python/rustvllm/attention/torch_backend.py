"""Paged attention in plain torch: runs everywhere, and is the reference for every faster backend.

Rows with one new token (decode) are computed together: their keys and values are gathered through the block table into
padded tensors, a limited number of bytes at a time. Whole prompts are computed together with others of similar length,
a limited number of bytes at a time; all their keys are in the step, so nothing is gathered. Chunks of prompts are
computed one request at a time, a limited number of queries at a time; so are prompts with tokens that see keys behind
them.

Slots that were never written, or that have another request's data, cannot affect a result: for every position beyond
the end of a sequence a gather reads slot 0 of the null block, which always holds zeros, and the mask drops it. Prompts
are padded at the end with their own last token, which the causal mask drops.

A window, a soft cap, slopes or sinks require every score (``scores.py``), for a limited number of queries at a time. A
window that is at least as long as the step's longest sequence costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from rustvllm.attention.metadata import AttentionMetadata, KVCacheSpec, visible_counts
from rustvllm.attention.scores import ScoreOptions, attend_by_scores

MAX_GATHER_BYTES = 64 << 20
"""The most bytes of keys and values that one decode chunk gathers (a single longer row is still gathered whole)."""
MAX_GATHER_BYTES_CPU = 4 << 20
"""The limit on the CPU, where gathered data should still be in the processor's cache when it is read."""
MAX_MASK_ELEMENTS = 1 << 24
"""The most query-key pairs of a prefill chunk for which a mask is made, or scores, which count for each head."""


class TorchAttentionBackend:
    """See the module.

    Args:
        spec: The shape of the cache.
        dtype: The dtype of the cache.
        max_gather_bytes: Limit of a decode chunk and of a group of prompts; tests make it small.
        max_mask_elements: Limit of a prefill chunk; tests make it small.
    """

    name = "torch"
    takes_table_rows = False

    def __init__(
        self,
        spec: KVCacheSpec,
        dtype: torch.dtype,
        *,
        max_gather_bytes: int = MAX_GATHER_BYTES,
        max_mask_elements: int = MAX_MASK_ELEMENTS,
    ) -> None:
        self.row_size = spec.num_kv_heads * spec.head_dim
        self.dtype = dtype
        self.max_gather_slots = max(1, max_gather_bytes // (2 * self.row_size * dtype.itemsize))
        self.max_mask_elements = max_mask_elements
        self._gathered: Tensor | None = None
        self._positions = torch.empty(0, dtype=torch.int32)

    def plan(self, metadata: AttentionMetadata) -> TorchAttentionPlan:
        """Split the step into decode chunks, groups of prompts and spans; see ``AttentionBackend.plan``."""
        return TorchAttentionPlan(metadata, self)

    def positions(self, length: int, device: torch.device) -> Tensor:
        """``[0, 1, …, length)``, int32."""
        if self._positions.shape[0] < length or self._positions.device != device:
            self._positions = torch.arange(max(length, 1024), dtype=torch.int32, device=device)
        return self._positions[:length]

    def gather(self, keys: Tensor, values: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the cache, ``[n, row_size]`` each, in memory that the next gather overwrites.

        Reused memory is in the processor's cache; making fresh memory costs the kernel more than the copy.

        Args:
            keys: ``[num_slots, row_size]``.
            values: Shaped like ``keys``.
            slots: int ``[n]``.
        """
        num_slots = slots.shape[0]
        if num_slots > self.max_gather_slots:
            return F.embedding(slots, keys), F.embedding(slots, values)
        if self._gathered is None:
            self._gathered = keys.new_empty((2, self.max_gather_slots, self.row_size))
        gathered_keys, gathered_values = self._gathered[:, :num_slots]
        torch.index_select(keys, 0, slots, out=gathered_keys)
        torch.index_select(values, 0, slots, out=gathered_values)
        return gathered_keys, gathered_values


@dataclass(frozen=True, slots=True)
class _DecodeChunk:
    tokens: Tensor | None  # int64 [rows], indices into the flattened batch; None if the batch is these rows, in order
    slots: Tensor  # int [rows, longest]
    bias: Tensor | None  # [rows, 1, 1, longest], −∞ beyond the end of a sequence; None if all are equally long
    query_positions: Tensor  # int32 [rows, 1]


@dataclass(frozen=True, slots=True)
class _PromptGroup:
    tokens: Tensor  # int64 [rows, longest], indices into the flattened batch; padded with a row's last token
    is_token: Tensor  # bool [rows, longest]


@dataclass(frozen=True, slots=True)
class _PrefillSpan:
    start: int  # first token in the flattened batch
    end: int
    num_computed: int  # tokens of the request that were cached before this step
    slots: Tensor  # int64 [num_computed + end - start]
    visible: Tensor | None  # int32 [end - start], how many keys each query sees; None: those up to its own


class TorchAttentionPlan:
    """One step's chunks, groups and spans; see ``AttentionPlan``."""

    def __init__(self, metadata: AttentionMetadata, backend: TorchAttentionBackend) -> None:
        self._backend = backend
        slot_mapping = metadata.slot_mapping.to(torch.int64)
        self._kept = torch.nonzero(slot_mapping >= 0)[:, 0] if metadata.has_padding else None
        self._slot_mapping = slot_mapping if self._kept is None else slot_mapping[self._kept]

        self._longest = int(metadata.seq_lens.max(initial=0))
        query_lens = np.diff(metadata.query_start_loc)
        is_decode = query_lens == 1
        self._decode = _decode_chunks(metadata, backend, np.flatnonzero(is_decode))
        self._prompts: list[_PromptGroup] = []
        self._prefill: list[_PrefillSpan] = []
        if not is_decode.all():
            is_prompt = ~is_decode & (query_lens == metadata.seq_lens) & ~_sees_ahead(metadata)
            self._prompts = _prompt_groups(metadata, backend, np.flatnonzero(is_prompt))
            self._prefill = [_prefill_span(metadata, int(i)) for i in np.flatnonzero(~is_decode & ~is_prompt)]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        scale: float,
        *,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        alibi_slopes: Sequence[float] | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See ``AttentionPlan.forward``."""
        if sliding_window is not None and sliding_window >= self._longest:
            sliding_window = None
        options = ScoreOptions.of(scale, sliding_window, soft_cap, alibi_slopes, query, sinks)
        num_kv_heads, head_dim = kv_cache.shape[-2:]
        keys, values = kv_cache.view(2, -1, num_kv_heads * head_dim)  # each [num_slots, KVH * D]
        self._write(keys, key)
        self._write(values, value)
        if self._decode and self._decode[0].tokens is None:
            return self._attend_decode(query, keys, values, self._decode[0], num_kv_heads, options)
        out = torch.empty_like(query)
        for chunk in self._decode:
            out[chunk.tokens] = self._attend_decode(query[chunk.tokens], keys, values, chunk, num_kv_heads, options)
        for group in self._prompts:
            self._attend_prompts(out, query, key, value, group, options)
        for span in self._prefill:
            self._attend_prefill(out, query, keys, values, span, num_kv_heads, options)
        return out

    def _write(self, cache: Tensor, new: Tensor) -> None:
        rows = new.flatten(1)
        if self._kept is not None:
            rows = rows[self._kept]
        cache.index_copy_(0, self._slot_mapping, rows)

    def _attend_decode(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        chunk: _DecodeChunk,
        num_kv_heads: int,
        options: ScoreOptions,
    ) -> Tensor:
        rows, num_heads, head_dim = query.shape
        longest = chunk.slots.shape[1]
        k, v = self._backend.gather(keys, values, chunk.slots.view(-1))
        k = k.view(rows, longest, num_kv_heads, head_dim).transpose(1, 2)
        v = v.view(rows, longest, num_kv_heads, head_dim).transpose(1, 2)
        if not options.is_plain:
            positions = self._backend.positions(longest, query.device)
            o = attend_by_scores(query[:, :, None], k, v, chunk.query_positions, positions, options)
            return o[:, :, 0]
        # Query heads that share a KV head see the same keys, so they take the place of queries of one sequence.
        q = query.reshape(rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=chunk.bias, scale=options.scale)
        return o.reshape(rows, num_heads, head_dim)

    def _attend_prefill(
        self,
        out: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        span: _PrefillSpan,
        num_kv_heads: int,
        options: ScoreOptions,
    ) -> None:
        num_heads, head_dim = query.shape[1:]
        seq_len = span.slots.shape[0]
        # F.embedding gathers rows many times faster on the CPU than indexing.
        k = F.embedding(span.slots, keys).view(1, seq_len, num_kv_heads, head_dim).transpose(1, 2)  # [1, KVH, S, D]
        v = F.embedding(span.slots, values).view(1, seq_len, num_kv_heads, head_dim).transpose(1, 2)
        gqa = num_heads != num_kv_heads
        pairs_per_row = seq_len if options.is_plain else seq_len * num_heads
        rows = max(1, self._backend.max_mask_elements // pairs_per_row)
        for start in range(span.start, span.end, rows):
            end = min(start + rows, span.end)
            first = span.num_computed + start - span.start  # position of the chunk's first query
            after = first + end - start
            counts = None if span.visible is None else span.visible[start - span.start : end - span.start]
            seen = slice(options.first_visible(first), after if counts is None else int(counts[-1]))
            q = query[start:end].transpose(0, 1)[None]
            key_positions = torch.arange(seen.start, seen.stop, device=query.device)
            query_positions = torch.arange(first, after, device=query.device)
            if options.is_plain:
                ends = query_positions + 1 if counts is None else counts
                mask = key_positions[None, :] < ends[:, None]  # [n, keys]
                o = F.scaled_dot_product_attention(
                    q, k[:, :, seen], v[:, :, seen], attn_mask=mask, scale=options.scale, enable_gqa=gqa
                )
            else:
                o = attend_by_scores(
                    q, k[:, :, seen], v[:, :, seen], query_positions[None], key_positions, options, counts
                )
            out[start:end] = o[0].transpose(0, 1)

    def _attend_prompts(
        self, out: Tensor, query: Tensor, key: Tensor, value: Tensor, group: _PromptGroup, options: ScoreOptions
    ) -> None:
        q, k, v = (part[group.tokens].transpose(1, 2) for part in (query, key, value))  # [rows, H or KVH, longest, D]
        if options.is_plain:
            gqa = q.shape[1] != k.shape[1]
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=options.scale, enable_gqa=gqa)
        else:
            o = self._attend_whole(q, k, v, options)
        out[group.tokens[group.is_token]] = o.transpose(1, 2)[group.is_token]

    def _attend_whole(self, q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions) -> Tensor:
        rows, num_heads, longest, _ = q.shape
        positions = self._backend.positions(longest, q.device)
        step = max(1, self._backend.max_mask_elements // (rows * num_heads * longest))
        out = torch.empty_like(q)
        for start in range(0, longest, step):
            end = min(start + step, longest)
            seen = slice(options.first_visible(start), end)
            out[:, :, start:end] = attend_by_scores(
                q[:, :, start:end], k[:, :, seen], v[:, :, seen], positions[None, start:end], positions[seen], options
            )
        return out


def _decode_chunks(
    metadata: AttentionMetadata, backend: TorchAttentionBackend, rows: npt.NDArray[np.int64]
) -> list[_DecodeChunk]:
    if not rows.size:
        return []
    lens = metadata.seq_lens[rows]
    if rows.size * int(lens.max()) <= backend.max_gather_slots:
        is_batch = rows.size == metadata.seq_lens.size and not metadata.has_padding
        return [_decode_chunk(metadata, backend, rows, is_batch=is_batch)]
    order = np.argsort(-lens, kind="stable")  # rows of similar length together, for little padding
    rows, lens = rows[order], lens[order]
    chunks = []
    begin = 0
    while begin < len(rows):
        end = min(len(rows), begin + max(1, backend.max_gather_slots // int(lens[begin])))
        chunks.append(_decode_chunk(metadata, backend, rows[begin:end], is_batch=False))
        begin = end
    return chunks


def _decode_chunk(
    metadata: AttentionMetadata, backend: TorchAttentionBackend, rows: npt.NDArray[np.int64], *, is_batch: bool
) -> _DecodeChunk:
    block_table, block_size = metadata.block_table, metadata.block_size
    device = block_table.device
    lens = metadata.seq_lens[rows]
    longest = int(lens.max())
    tokens = None
    if not is_batch:
        tokens = torch.from_numpy(metadata.query_start_loc[rows].astype(np.int64)).to(device)
        block_table = block_table[torch.from_numpy(rows).to(device)]
    query_positions = torch.from_numpy(lens).to(device)[:, None] - 1
    blocks = block_table[:, : -(-longest // block_size), None]
    slots = (blocks * block_size + backend.positions(block_size, device)).flatten(1)[:, :longest]
    if int(lens.min()) == longest:
        return _DecodeChunk(tokens, slots.contiguous(), None, query_positions)
    beyond = backend.positions(longest, device) > query_positions
    slots = slots.masked_fill(beyond, 0)
    bias = torch.zeros(beyond.shape, dtype=backend.dtype, device=device).masked_fill_(beyond, -torch.inf)
    return _DecodeChunk(tokens, slots.contiguous(), bias[:, None, None, :], query_positions)


def _prompt_groups(
    metadata: AttentionMetadata, backend: TorchAttentionBackend, rows: npt.NDArray[np.int64]
) -> list[_PromptGroup]:
    device = metadata.block_table.device
    lens = metadata.seq_lens[rows]
    order = np.argsort(-lens, kind="stable")
    rows, lens = rows[order], lens[order]
    groups = []
    begin = 0
    while begin < len(rows):
        longest = int(lens[begin])
        end = min(len(rows), begin + max(1, backend.max_gather_slots // longest))
        end = begin + int(np.searchsorted(-lens[begin:end], -longest / 2, side="right"))  # at most half is padding
        starts, ends = metadata.query_start_loc[rows[begin:end]], metadata.query_start_loc[rows[begin:end] + 1]
        tokens = starts[:, None] + np.arange(longest)
        is_token = tokens < ends[:, None]
        tokens = np.minimum(tokens, ends[:, None] - 1)
        groups.append(_PromptGroup(torch.from_numpy(tokens).to(device), torch.from_numpy(is_token).to(device)))
        begin = end
    return groups


def _prefill_span(metadata: AttentionMetadata, row: int) -> _PrefillSpan:
    start, end = int(metadata.query_start_loc[row]), int(metadata.query_start_loc[row + 1])
    seq_len, block_size = int(metadata.seq_lens[row]), metadata.block_size
    blocks = metadata.block_table[row, : -(-seq_len // block_size)].to(torch.int64)
    offsets = torch.arange(block_size, device=blocks.device)
    slots = (blocks[:, None] * block_size + offsets).flatten()[:seq_len]
    visible = None if metadata.visible is None else torch.from_numpy(metadata.visible[start:end]).to(blocks.device)
    return _PrefillSpan(start, end, seq_len - (end - start), slots, visible)


def _sees_ahead(metadata: AttentionMetadata) -> npt.NDArray[np.bool_]:
    """Which requests have tokens that see keys behind them, ``[num_reqs]``."""
    if metadata.visible is None:
        return np.zeros(metadata.seq_lens.size, np.bool_)
    starts = metadata.query_start_loc
    nothing = np.empty(0, np.int64), np.empty(0, np.int32)
    more = metadata.visible[: starts[-1]] > visible_counts(starts, metadata.seq_lens, *nothing)
    return np.diff(np.concatenate(([0], np.cumsum(more)))[starts]) > 0
