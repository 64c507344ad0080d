"""Moves KV blocks before a step runs: out to CPU memory, back from there, and from one block of the cache to another.

The scheduler lists the blocks as pairs: ``blocks_to_swap_out``, ``blocks_to_swap_in`` and ``blocks_to_copy``. The three
lists must run in this order: a block that is swapped out may be given to another request in the same step, so all of
them are read before any block is written, and a block that was just swapped in may then be copied. Within a list the
order does not matter: no block is the target of two pairs, and none is both source and target.

On a GPU the copies run in their own stream, after everything computed so far and before what is computed next. Only the
last part of a swap-out holds up neither: blocks stay in pinned memory until they, or the memory, are needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rustvllm.worker.step_buffers import StepBuffers, send_array

if TYPE_CHECKING:
    from rustvllm._core import SchedulerOutput
    from rustvllm.worker.streams import DeviceStreams, Event

MAX_BYTES_AT_ONCE = 64 << 20
"""The most bytes gathered at a time: of one layer on the CPU, of all layers on a GPU, which needs that much free."""
STAGING_BYTES = 256 << 20
"""The most pinned memory that swapped blocks pass through."""

_Blocks = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _InTransit:
    """Blocks in pinned memory: either on their way out to the CPU tier, or on their way in with nothing left to do."""

    staged: Tensor  # [layers, 2, n, block_size, num_kv_heads, head_dim]
    cpu_blocks: _Blocks | None
    arrived: Event


class BlockCopier:
    """Holds the CPU tier of a KV cache and copies blocks between the two.

    Args:
        kv_caches: One per layer, ``[2, num_blocks, block_size, num_kv_heads, head_dim]``, on the device.
        num_cpu_blocks: Blocks in CPU memory; 0 if preemption does not swap.
        streams: The device's streams; None if the device does everything in order, as the CPU does.
        max_bytes_at_once: Limit on the bytes gathered at a time; tests make it small.
        staging_bytes: Limit on the pinned memory; tests make it small, too.

    Attributes:
        cpu_caches: One per layer in CPU memory, shaped like ``kv_caches`` but with ``num_cpu_blocks`` blocks; empty
            without a CPU tier.
    """

    def __init__(
        self,
        kv_caches: Sequence[Tensor],
        num_cpu_blocks: int,
        *,
        streams: DeviceStreams | None = None,
        max_bytes_at_once: int = MAX_BYTES_AT_ONCE,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        self.kv_caches = list(kv_caches)
        first = self.kv_caches[0]
        self._device = first.device
        self._streams = streams
        bytes_per_block = first[:, 0].nbytes * (1 if streams is None else len(self.kv_caches))
        self._blocks_at_once = max(1, max_bytes_at_once // bytes_per_block)
        self.cpu_caches: list[Tensor] = []
        if num_cpu_blocks:
            shape = (first.shape[0], num_cpu_blocks, *first.shape[2:])
            self.cpu_caches = [zeros_on_host(shape, first.dtype) for _ in self.kv_caches]
        self._staging = torch.empty(0, dtype=first.dtype, device="cpu")
        self._staged = 0  # how many of its elements are in transit
        self._in_transit: deque[_InTransit] = deque()
        if num_cpu_blocks and streams is not None:
            # A GPU reads and writes pinned memory many times faster than other memory. This buffer is enough: pinning
            # the tier itself would lock all its bytes into memory from the start.
            staged = max(1, min(num_cpu_blocks, staging_bytes // bytes_per_block))
            self._blocks_at_once = min(self._blocks_at_once, staged)
            size = staged * bytes_per_block // first.itemsize
            pin = self._device.type == "cuda"
            self._staging = torch.empty(size, dtype=first.dtype, device="cpu", pin_memory=pin)

    def execute(self, output: SchedulerOutput, step: StepBuffers) -> None:
        """Make the copies of a step on every layer; each list is finished before the next one begins.

        Call this before the model runs. On a GPU the host waits only if pinned memory runs out, or if a block that
        comes back was swapped out just before.

        Args:
            output: The scheduler's output.
            step: The buffer set of the step.
        """
        if not (output.num_swap_out or output.num_swap_in or output.num_copies):
            return
        swap_out, swap_in, copies = (
            step.int32(name, length).astype(np.int64).T  # a copy, because the core reuses the arrays after the step
            for name, length in (
                ("blocks_to_swap_out", output.num_swap_out),
                ("blocks_to_swap_in", output.num_swap_in),
                ("blocks_to_copy", output.num_copies),
            )
        )
        if self._streams is None:
            self._swap_out(*swap_out)
            self._swap_in(*swap_in)
            self._copy(*copies)
        else:
            self._execute_on_its_stream(self._streams, swap_out, swap_in, copies)

    def _swap_out(self, blocks: _Blocks, cpu_blocks: _Blocks) -> None:
        for piece, cpu_piece in self._pieces(blocks, cpu_blocks):
            source, target = torch.from_numpy(piece), torch.from_numpy(cpu_piece)
            for cache, cpu_cache in zip(self.kv_caches, self.cpu_caches, strict=True):
                cpu_cache.index_copy_(1, target, cache.index_select(1, source))

    def _swap_in(self, cpu_blocks: _Blocks, blocks: _Blocks) -> None:
        for cpu_piece, piece in self._pieces(cpu_blocks, blocks):
            source, target = torch.from_numpy(cpu_piece), torch.from_numpy(piece)
            for cache, cpu_cache in zip(self.kv_caches, self.cpu_caches, strict=True):
                cache.index_copy_(1, target, cpu_cache.index_select(1, source))

    def _copy(self, sources: _Blocks, targets: _Blocks) -> None:
        for source_piece, target_piece in self._pieces(sources, targets):
            source, target = send_array(source_piece, self._device), send_array(target_piece, self._device)
            for cache in self.kv_caches:
                cache.index_copy_(1, target, cache.index_select(1, source))

    def _execute_on_its_stream(
        self, streams: DeviceStreams, swap_out: _Blocks, swap_in: _Blocks, copies: _Blocks
    ) -> None:
        swaps = streams.swaps
        swaps.wait_event(streams.compute.record_event())
        with streams.use(swaps):
            leaving: tuple[list[Tensor], _Blocks] | None = None
            for piece, cpu_piece in self._pieces(*swap_out):
                if leaving is not None:
                    self._fetch(streams, *leaving)
                on_device = send_array(piece, self._device)
                leaving = [cache.index_select(1, on_device) for cache in self.kv_caches], cpu_piece
            if leaving is not None and np.isin(swap_in[0], leaving[1]).any():
                self._fetch(streams, *leaving)
                leaving = None
            self._bring_back(streams, *swap_in)
            self._copy(*copies)
            streams.compute.wait_event(swaps.record_event())
            if leaving is not None:  # after the event above, so that the next computation does not wait for this
                self._fetch(streams, *leaving)

    def _fetch(self, streams: DeviceStreams, gathered: list[Tensor], cpu_blocks: _Blocks) -> None:
        """Launch the copy of gathered blocks, ``[2, n, …]`` per layer, into pinned memory."""
        staged = self._take_staging(cpu_blocks.size)
        for part, target in zip(gathered, staged, strict=True):
            target.copy_(part, non_blocking=True)
        self._in_transit.append(_InTransit(staged, cpu_blocks, streams.swaps.record_event()))

    def _bring_back(self, streams: DeviceStreams, cpu_blocks: _Blocks, blocks: _Blocks) -> None:
        if any(one.cpu_blocks is not None and np.isin(cpu_blocks, one.cpu_blocks).any() for one in self._in_transit):
            self._settle()
        for cpu_piece, piece in self._pieces(cpu_blocks, blocks):
            staged = self._take_staging(piece.size)
            source = torch.from_numpy(cpu_piece)
            target = send_array(piece, self._device)
            for cache, cpu_cache, part in zip(self.kv_caches, self.cpu_caches, staged, strict=True):
                torch.index_select(cpu_cache, 1, source, out=part)
                cache.index_copy_(1, target, torch.empty_like(part, device=self._device).copy_(part, non_blocking=True))
            self._in_transit.append(_InTransit(staged, None, streams.swaps.record_event()))

    def _take_staging(self, num_blocks: int) -> Tensor:
        """Pinned memory for blocks of all layers, ``[layers, 2, num_blocks, …]``; waits until there is enough."""
        while self._in_transit and self._in_transit[0].arrived.query():
            self._settle_oldest()
        of_layer = self.kv_caches[0].shape
        shape = (len(self.kv_caches), of_layer[0], num_blocks, *of_layer[2:])
        size = int(np.prod(shape, dtype=np.int64))
        if self._staged + size > self._staging.shape[0]:
            self._settle()
        start = self._staged
        self._staged += size
        return self._staging[start : start + size].view(shape)

    def _settle(self) -> None:
        """Wait until nothing is in transit."""
        while self._in_transit:
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        one = self._in_transit.popleft()
        one.arrived.synchronize()
        if one.cpu_blocks is not None:
            target = torch.from_numpy(one.cpu_blocks)
            for part, cpu_cache in zip(one.staged, self.cpu_caches, strict=True):
                cpu_cache.index_copy_(1, target, part)
        if not self._in_transit:
            self._staged = 0

    def _pieces(self, sources: _Blocks, targets: _Blocks) -> Iterator[tuple[_Blocks, _Blocks]]:
        for start in range(0, sources.size, self._blocks_at_once):
            piece = slice(start, start + self._blocks_at_once)
            yield np.ascontiguousarray(sources[piece]), np.ascontiguousarray(targets[piece])


def zeros_on_host(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in CPU memory that only take up space once they are touched."""
    # The kernel gives numpy zeroed pages, which exist only once they are touched; torch would write the zeros.
    flat = np.zeros(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize, np.uint8)
    return torch.from_numpy(flat).view(dtype).view(shape)
