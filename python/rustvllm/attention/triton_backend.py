"""Paged attention by Triton kernels, for CUDA devices.

Prompts and pieces of prompts are cut into tiles of tokens. Requests with one new token have their own tiles, with their
own sizes, and their keys are split if the tiles are too few to fill the device. The same holds for requests with drafts
in a CUDA graph, where each request has its own tiles. With ``batch_invariant`` there is one tile size and nothing is
split, so a token's result does not depend, bit for bit, on other requests or on the chunks of its prompt.

Planning sends the tiles of prompts to the device, together with the rest of the step if that has not been sent yet, and
the lengths if they are not there. A step whose inputs have fixed addresses is planned once and sends nothing, so it can
be captured in a CUDA graph; if it has pieces of prompts, the device itself cuts them into tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rustvllm.attention.backend import HeadNorms
from rustvllm.attention.metadata import AttentionMetadata, KVCacheSpec
from rustvllm.attention.scores import ScoreOptions
from rustvllm.attention.static_batch import StaticDecodeBatch, StaticDraftBatch, StaticMixedBatch
from rustvllm.kernels import tuning
from rustvllm.kernels.kv_write import kv_write
from rustvllm.kernels.paged_attention import (
    MAX_HEAD_DIM,
    MAX_SPLITS,
    MIN_SPLIT_KEYS,
    Tiles,
    paged_attention,
    tokens_per_tile,
)
from rustvllm.kernels.rotary_write import rotary_write
from rustvllm.kernels.tile_list import list_decodes, list_tiles, num_tiles

TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PROGRAMS_PER_PROCESSOR = 2
"""Keys are split until a decode has this many programs per multiprocessor."""
MAX_DRAFT_ROWS = 64
"""The most rows of a tile of a request with drafts: tokens times the heads that share a KV head."""


class TritonAttentionBackend:
    """See the module.

    Args:
        spec: The shape of the cache.
        dtype: The dtype of queries, and of the cache unless that has 8 bits.
        device: A CUDA device, or the CPU in Triton's interpreter. ``why_not`` says whether it is suitable.
        batch_invariant: Whether the order of sums must not depend on the batch.
    """

    name = "triton"
    takes_table_rows = True

    def __init__(
        self, spec: KVCacheSpec, dtype: torch.dtype, device: torch.device, *, batch_invariant: bool = False
    ) -> None:
        self.device = device
        self.batch_invariant = batch_invariant
        self.prompt_config = tuning.attention_config(device, dtype.itemsize, spec.head_dim, decode=False)
        self.decode_config = self.prompt_config
        if not batch_invariant:
            self.decode_config = tuning.attention_config(device, dtype.itemsize, spec.head_dim, decode=True)
        # As many as ``num_splits`` can make programs of split decodes, which is at most two per multiprocessor.
        size = PROGRAMS_PER_PROCESSOR * tuning.num_processors(device)
        self._counters = None if batch_invariant else torch.zeros(size, dtype=torch.int32, device=device)
        self.head_counts: set[tuple[int, int]] = set()  # of queries and of keys, of all layers computed so far
        self._slopes: dict[tuple[float, ...], Tensor] = {}
        self._counting = torch.empty(0, dtype=torch.int32, device=device)
        self._zeros = self._counting

    def plan(self, metadata: AttentionMetadata) -> TritonAttentionPlan:
        """Send lengths and tiles to the device; see ``AttentionBackend.plan``."""
        plan = TritonAttentionPlan(self, _Batch.of(metadata, self))
        if metadata.stage is not None:
            plan.stage_launches(metadata.stage)
        return plan

    def plan_static(self, batch: StaticDecodeBatch) -> TritonAttentionPlan:
        """See ``StaticAttentionBackend.plan_static``; only the batch's size determines how keys are split."""
        num_reqs = batch.seq_lens.shape[0]
        self.zeros(num_reqs)  # allocated now, because a capture must not allocate it
        return TritonAttentionPlan(
            self,
            _Batch(
                block_table=batch.block_table,
                table_rows=batch.table_rows,
                slot_mapping=batch.slot_mapping,
                query_start_loc=self.counting(num_reqs + 1),
                seq_lens=batch.seq_lens,
                query_lens=np.ones(num_reqs, np.int32),
                host_seq_lens=np.full(num_reqs, batch.max_seq_len, np.int32),
                num_tokens=num_reqs,
            ),
        )

    def plan_static_mixed(self, batch: StaticMixedBatch) -> TritonMixedPlan:
        """See ``StaticAttentionBackend.plan_static_mixed``; the room for requests determines how keys are split."""
        return TritonMixedPlan(self, _Batch.of_static(batch))

    def plan_static_drafts(self, batch: StaticDraftBatch) -> TritonDraftPlan:
        """See ``StaticAttentionBackend.plan_static_drafts``; the room for requests determines how keys are split."""
        return TritonDraftPlan(self, _Batch.of_static(batch), batch.width)

    @property
    def counters(self) -> Tensor | None:
        """Counters of the finished parts of decodes, int32 zeros between any two launches; None if nothing is split."""
        return self._counters

    def counting(self, length: int) -> Tensor:
        """``[0, 1, …, length)``, int32 on the device; tensors returned earlier do not change."""
        if self._counting.shape[0] < length:
            self._counting = torch.arange(tuning.power_of_two(length), dtype=torch.int32, device=self.device)
        return self._counting[:length]

    def zeros(self, length: int) -> Tensor:
        """``length`` zeros, int32 on the device."""
        if self._zeros.shape[0] < length:
            self._zeros = torch.zeros(tuning.power_of_two(length), dtype=torch.int32, device=self.device)
        return self._zeros[:length]

    def slopes(self, slopes: Sequence[float] | None, num_heads: int) -> Tensor | None:
        """ALiBi slopes on the device; each list is sent once.

        Raises:
            ValueError: There is not one slope per head.
        """
        if not slopes:
            return None
        if len(slopes) != num_heads:
            raise ValueError(f"alibi_slopes has length {len(slopes)}, expected {num_heads}")
        key = tuple(slopes)
        if key not in self._slopes:
            self._slopes[key] = torch.tensor(key, dtype=torch.float32, device=self.device)
        return self._slopes[key]

    def num_splits(self, num_rows: int, num_kv_heads: int, longest: int) -> int:
        """The number of parts into which the keys of each decode are split.

        There are as many as fill the device, if each gets enough keys. The number depends on how many decodes the step
        has, on the heads of the cache, the device, and the longest of the decodes.
        """
        if self.batch_invariant:
            return 1
        wanted = PROGRAMS_PER_PROCESSOR * tuning.num_processors(self.device) // (num_rows * num_kv_heads)
        return max(1, min(wanted, -(-longest // MIN_SPLIT_KEYS), MAX_SPLITS))


def why_not(spec: KVCacheSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the kernels cannot run a model, with the number that is the reason; None if they can."""
    if spec.head_dim > MAX_HEAD_DIM:
        return f"its kernels serve heads of at most {MAX_HEAD_DIM} features and the model's have {spec.head_dim}"
    if dtype not in TRITON_DTYPES:
        return f"its kernels compute in float32, float16 and bfloat16, not in {dtype}"
    if device.type == "cpu":
        return None if tuning.INTERPRETED else "device is cpu, where its kernels only run under TRITON_INTERPRET=1"
    if tuning.INTERPRETED:
        return "TRITON_INTERPRET is set, under which kernels run on the CPU: unset it"
    if tuning.capability(device) < tuning.MIN_CAPABILITY:
        needed, has = (".".join(map(str, pair)) for pair in (tuning.MIN_CAPABILITY, tuning.capability(device)))
        return f"its kernels need compute capability {needed} and {device} has {has}"
    return tuning.why_no_toolchain()


@dataclass(frozen=True, slots=True)
class _Batch:
    """A step, with its tensors on the device."""

    block_table: Tensor
    table_rows: Tensor
    slot_mapping: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    query_lens: npt.NDArray[np.int32]
    host_seq_lens: npt.NDArray[np.int32]  # or upper limits
    num_tokens: int  # tokens that belong to a request

    @classmethod
    def of(cls, metadata: AttentionMetadata, backend: TritonAttentionBackend) -> _Batch:
        starts, seq_lens = metadata.query_start_loc, metadata.seq_lens
        num_reqs = seq_lens.size
        query_lens = np.diff(starts)
        if metadata.on_device is not None:
            start_loc, on_device = metadata.on_device
        elif int(starts[-1]) == num_reqs and (query_lens == 1).all():
            on_device = _send(backend.device, seq_lens)
            start_loc = backend.counting(num_reqs + 1)
        else:
            both = _send(backend.device, starts, seq_lens)
            start_loc, on_device = both[: num_reqs + 1], both[num_reqs + 1 :]
        return cls(
            block_table=metadata.block_table,
            table_rows=backend.counting(num_reqs) if metadata.table_rows is None else metadata.table_rows,
            slot_mapping=metadata.slot_mapping,
            query_start_loc=start_loc,
            seq_lens=on_device,
            query_lens=query_lens,
            host_seq_lens=seq_lens,
            num_tokens=int(starts[-1]),
        )

    @classmethod
    def of_static(cls, batch: StaticMixedBatch | StaticDraftBatch) -> _Batch:
        return cls(
            block_table=batch.block_table,
            table_rows=batch.table_rows,
            slot_mapping=batch.slot_mapping,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            query_lens=np.zeros(batch.seq_lens.shape[0], np.int32),  # unknown on the host
            host_seq_lens=np.full(batch.seq_lens.shape[0], batch.max_seq_len, np.int32),
            num_tokens=batch.slot_mapping.shape[0],
        )


@dataclass(frozen=True, slots=True)
class _Launch:
    tiles: Tiles
    config: tuning.TileConfig
    num_splits: int
    counters: Tensor | None = None  # of decodes


class TritonAttentionPlan:
    """One step; see ``AttentionPlan``."""

    def __init__(self, backend: TritonAttentionBackend, batch: _Batch) -> None:
        self._backend = backend
        self._batch = batch
        self._launches: dict[tuple[int, int], list[_Launch]] = {}  # by heads of queries and of keys
        self._stage: Callable[[npt.NDArray[np.int32]], Tensor] | None = None

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
        """See ``AttentionPlan.forward``; results of tokens that belong to no request are zeros."""
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        kv_write(key, value, kv_cache, self._batch.slot_mapping)
        slopes = self._backend.slopes(alibi_slopes, query.shape[1])
        return self._attend(query, kv_cache, scale, sliding_window, soft_cap, slopes, sinks)

    def forward_rotary(
        self,
        qkv: Tensor,
        num_heads: int,
        positions: Tensor,
        table: Tensor,
        kv_cache: Tensor,
        scale: float,
        *,
        head_norms: HeadNorms | None = None,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        is_by_head: bool = False,
    ) -> Tensor:
        """See ``RotaryAttentionPlan.forward_rotary``; results of tokens that belong to no request are zeros."""
        query = rotary_write(
            qkv,
            num_heads,
            positions,
            table,
            kv_cache,
            self._batch.slot_mapping,
            norm_weights=None if head_norms is None else (head_norms.query, head_norms.key),
            eps=0.0 if head_norms is None else head_norms.eps,
            weight_offset=0.0 if head_norms is None else head_norms.weight_offset,
            is_by_head=is_by_head,
        )
        return self._attend(query, kv_cache, scale, sliding_window, soft_cap, None, sinks)

    def _attend(
        self,
        query: Tensor,
        kv_cache: Tensor,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        slopes: Tensor | None,
        sinks: Tensor | None,
    ) -> Tensor:
        options = ScoreOptions.of(scale, sliding_window, soft_cap, None, query, sinks)
        make = torch.empty if self._batch.num_tokens == query.shape[0] else torch.zeros
        out = make(query.shape, dtype=query.dtype, device=query.device)
        for launch in self._launches_for(query.shape[1], kv_cache.shape[3]):
            paged_attention(
                out,
                query,
                kv_cache,
                self._batch.block_table,
                launch.tiles,
                launch.config,
                scale,
                sliding_window=options.sliding_window,
                soft_cap=options.soft_cap,
                alibi_slopes=slopes,
                sinks=options.sinks,
                num_splits=launch.num_splits,
                counters=launch.counters,
            )
        return out

    def stage_launches(self, stage: Callable[[npt.NDArray[np.int32]], Tensor]) -> None:
        """Prepare the launches of layers with known numbers of heads, while their tiles can still be staged."""
        self._stage = stage
        for counts in tuple(self._backend.head_counts):
            self._launches_for(*counts)
        self._stage = None

    def _launches_for(self, num_heads: int, num_kv_heads: int) -> list[_Launch]:
        """The launches, made for the first layer and used by all with the same numbers of heads."""
        launches = self._launches.get((num_heads, num_kv_heads))
        if launches is None:
            launches = list(self._make_launches(num_heads // num_kv_heads, num_kv_heads))
            self._launches[num_heads, num_kv_heads] = launches
            self._backend.head_counts.add((num_heads, num_kv_heads))
        return launches

    def _send(self, *arrays: npt.NDArray[np.integer]) -> Tensor:
        """The arrays one after the other, int32 on the device; sent with the rest of the step if that is possible."""
        if self._stage is None:
            return _send(self._backend.device, *arrays)
        return self._stage(np.concatenate(arrays).astype(np.int32))

    def _make_launches(self, group_size: int, num_kv_heads: int) -> list[_Launch]:
        backend, batch = self._backend, self._batch
        num_reqs = batch.query_lens.size
        is_decode = batch.query_lens == 1
        if is_decode.all():
            num_splits = backend.num_splits(num_reqs, num_kv_heads, int(batch.host_seq_lens.max()))
            requests, first_tokens = backend.counting(num_reqs), backend.zeros(num_reqs)
            tiles = self._tiles(requests, first_tokens)
            return [_Launch(tiles, backend.decode_config, num_splits, backend.counters)]
        config = backend.prompt_config
        in_tiles = np.ones_like(is_decode) if backend.batch_invariant else ~is_decode
        cut_requests, cut_tokens = _cut(batch, np.flatnonzero(in_tiles), tokens_per_tile(config, group_size)[0])
        decodes = np.flatnonzero(~in_tiles)
        num_tiles, num_decodes = cut_requests.size, decodes.size
        sent = self._send(cut_requests, cut_tokens, decodes)
        launches = [_Launch(self._tiles(sent[:num_tiles], sent[num_tiles : 2 * num_tiles]), config, 1)]
        if num_decodes:
            longest = int(batch.host_seq_lens[decodes].max())
            num_splits = backend.num_splits(num_decodes, num_kv_heads, longest)
            requests, first_tokens = sent[2 * num_tiles :], backend.zeros(num_decodes)
            tiles = self._tiles(requests, first_tokens)
            launches.append(_Launch(tiles, backend.decode_config, num_splits, backend.counters))
        return launches

    def _tiles(self, requests: Tensor, first_tokens: Tensor) -> Tiles:
        batch = self._batch
        return Tiles(requests, first_tokens, batch.query_start_loc, batch.seq_lens, batch.table_rows)


class TritonMixedPlan(TritonAttentionPlan):
    """A step of a CUDA graph with pieces of prompts; see ``StaticMixedPlan``."""

    def begin_step(self) -> None:
        """Compute the tiles of the current batch; for the first step, the first layer does this."""
        for (num_heads, num_kv_heads), launches in self._launches.items():
            self._list_tiles(num_heads // num_kv_heads, launches)

    def _make_launches(self, group_size: int, num_kv_heads: int) -> list[_Launch]:
        backend, batch = self._backend, self._batch
        num_reqs, config = batch.seq_lens.shape[0], backend.prompt_config
        tile_tokens = tokens_per_tile(config, group_size)[0]
        launches = [_Launch(self._empty_tiles(num_tiles(batch.num_tokens, num_reqs, tile_tokens)), config, 1)]
        if not backend.batch_invariant:
            num_splits = backend.num_splits(num_reqs, num_kv_heads, int(batch.host_seq_lens.max()))
            launches.append(_Launch(self._empty_tiles(num_reqs), backend.decode_config, num_splits, backend.counters))
        self._list_tiles(group_size, launches)
        return launches

    def _empty_tiles(self, length: int) -> Tiles:
        requests, first_tokens = torch.zeros((2, length), dtype=torch.int32, device=self._backend.device)
        return self._tiles(requests, first_tokens)

    def _list_tiles(self, group_size: int, launches: Sequence[_Launch]) -> None:
        """Compute the tiles of prompts and, unless one tile size serves all, of decodes."""
        starts, (cut, *decodes) = self._batch.query_start_loc, [launch.tiles for launch in launches]
        tile_tokens = tokens_per_tile(self._backend.prompt_config, group_size)[0]
        list_tiles(cut.requests, cut.first_tokens, starts, tile_tokens, skip_decodes=bool(decodes))
        for tiles in decodes:
            list_decodes(tiles.requests, tiles.first_tokens, starts)


class TritonDraftPlan(TritonAttentionPlan):
    """A step of a CUDA graph with drafts: each request has as many tiles as its largest number of tokens needs."""

    def __init__(self, backend: TritonAttentionBackend, batch: _Batch, width: int) -> None:
        super().__init__(backend, batch)
        self._width = width

    def _make_launches(self, group_size: int, num_kv_heads: int) -> list[_Launch]:
        backend, batch = self._backend, self._batch
        config = backend.prompt_config
        if not backend.batch_invariant:
            rows = min(tuning.power_of_two(self._width * group_size), MAX_DRAFT_ROWS)
            config = backend.decode_config
            config = replace(config, rows=max(rows, config.rows))
        tile_tokens = tokens_per_tile(config, group_size)[0]
        num_parts = -(-self._width // tile_tokens)
        length = batch.seq_lens.shape[0] * num_parts
        tile = torch.arange(length, dtype=torch.int32, device=backend.device)
        num_splits = backend.num_splits(length, num_kv_heads, int(batch.host_seq_lens.max()))
        tiles = self._tiles(tile // num_parts, tile % num_parts * tile_tokens)
        return [_Launch(tiles, config, num_splits, backend.counters)]


def _cut(
    batch: _Batch, rows: npt.NDArray[np.int64], num_tokens: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The tiles of some requests' new tokens: request and first token of each; those with the most keys come first."""
    query_lens = batch.query_lens[rows]
    num_tiles = -(-query_lens // num_tokens)
    which = np.repeat(np.arange(rows.size), num_tiles)
    first = (np.arange(which.size) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * num_tokens
    num_keys = (batch.host_seq_lens[rows] - query_lens)[which] + first
    order = np.argsort(-num_keys, kind="stable")  # otherwise the device waits for one long tile at the end
    return rows[which][order], first[order]


def _send(device: torch.device, *arrays: npt.NDArray[np.integer]) -> Tensor:
    """The arrays one after the other, int32 on the device; the host does not wait."""
    joined = torch.from_numpy(np.concatenate(arrays).astype(np.int32))
    if device.type == "cpu":
        return joined
    return joined.pin_memory().to(device, non_blocking=True)
