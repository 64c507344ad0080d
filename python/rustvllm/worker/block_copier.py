"""Moves KV blocks before a step runs: out to CPU memory, back from there, and from one block of the cache to another.

The scheduler says which (``blocks_to_swap_out``, ``blocks_to_swap_in``, ``blocks_to_copy``, as pairs). The order of the
three lists is part of their meaning: a block that is swapped out may be given away in the same step, so all of them
are read before any is written; and a block may be copied that was swapped in just before. Within a list the order does
not matter: no block is the target of two pairs, and none is both source and target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rustvllm.worker.step_buffers import StepBuffers

if TYPE_CHECKING:
    from rustvllm._core import SchedulerOutput

MAX_BYTES_AT_ONCE = 64 << 20
"""Most bytes of one layer that are gathered at a time: what a GPU must have free beside its cache."""


class BlockCopier:
    """The CPU tier of a KV cache, and the copies between the two.

    Args:
        kv_caches: one per layer, ``[2, num_blocks, block_size, num_kv_heads, head_dim]``, on the device.
        num_cpu_blocks: blocks in CPU memory; 0 when nothing is swapped.
        max_bytes_at_once: bound on what is gathered at a time; tests make it small.

    Attributes:
        cpu_caches: one per layer on the host, shaped as the caches with ``num_cpu_blocks`` blocks; none without a tier.
    """

    def __init__(
        self, kv_caches: Sequence[Tensor], num_cpu_blocks: int, *, max_bytes_at_once: int = MAX_BYTES_AT_ONCE
    ) -> None:
        self.kv_caches = list(kv_caches)
        first = self.kv_caches[0]
        self._device = first.device
        block_bytes = first[:, 0].nbytes
        self._blocks_at_once = max(1, max_bytes_at_once // block_bytes)
        self.cpu_caches: list[Tensor] = []
        self._staging: Tensor | None = None
        if num_cpu_blocks:
            shape = (first.shape[0], num_cpu_blocks, *first.shape[2:])
            self.cpu_caches = [zeros_on_host(shape, first.dtype) for _ in self.kv_caches]
        if num_cpu_blocks and self._device.type == "cuda":
            # A GPU reads and writes pinned memory many times faster than other memory. This piece of it is enough: the
            # tier itself would be locked into memory for good, every byte of it from the start.
            length = min(self._blocks_at_once, num_cpu_blocks)
            self._staging = torch.empty((length, *first[:, 0].shape), dtype=first.dtype, device="cpu", pin_memory=True)

    def execute(self, output: SchedulerOutput, step: StepBuffers) -> None:
        """Make the copies of a step, all of each list before the next list, on every layer.

        To be called before the model runs. On a GPU a swap waits for its copies; copies within the cache are queued
        before the model like everything else.

        Args:
            output: of the scheduler.
            step: the buffer set of the step.
        """
        if output.num_swap_out:
            self._swap_out(*_columns(step.int32("blocks_to_swap_out", output.num_swap_out)))
        if output.num_swap_in:
            self._swap_in(*_columns(step.int32("blocks_to_swap_in", output.num_swap_in)))
        if output.num_copies:
            self._copy(*_columns(step.int32("blocks_to_copy", output.num_copies)))

    def _swap_out(self, blocks: Tensor, cpu_blocks: Tensor) -> None:
        for piece, cpu_piece in self._pieces(blocks, cpu_blocks):
            on_device = piece.to(self._device)
            for cache, cpu_cache in zip(self.kv_caches, self.cpu_caches, strict=True):
                gathered = cache.index_select(1, on_device)  # [2, n, block_size, num_kv_heads, head_dim]
                cpu_cache.index_copy_(1, cpu_piece, self._to_host(gathered))

    def _swap_in(self, cpu_blocks: Tensor, blocks: Tensor) -> None:
        for cpu_piece, piece in self._pieces(cpu_blocks, blocks):
            on_device = piece.to(self._device)
            for cache, cpu_cache in zip(self.kv_caches, self.cpu_caches, strict=True):
                cache.index_copy_(1, on_device, self._to_device(cpu_cache, cpu_piece))

    def _copy(self, sources: Tensor, targets: Tensor) -> None:
        for source_piece, target_piece in self._pieces(sources, targets):
            source, target = source_piece.to(self._device), target_piece.to(self._device)
            for cache in self.kv_caches:
                cache.index_copy_(1, target, cache.index_select(1, source))

    def _pieces(self, sources: Tensor, targets: Tensor) -> zip[tuple[Tensor, Tensor]]:
        size = self._blocks_at_once
        return zip(torch.split(sources, size), torch.split(targets, size), strict=True)

    def _to_host(self, gathered: Tensor) -> Tensor:
        if self._staging is None:
            return gathered
        return self._staged(gathered.shape[1]).copy_(gathered)

    def _to_device(self, cpu_cache: Tensor, cpu_blocks: Tensor) -> Tensor:
        if self._staging is None:
            return cpu_cache.index_select(1, cpu_blocks)
        staged = self._staged(cpu_blocks.shape[0])
        torch.index_select(cpu_cache, 1, cpu_blocks, out=staged)
        # It waits: the next layer is gathered into the same memory.
        return staged.to(self._device)

    def _staged(self, num_blocks: int) -> Tensor:
        """Pinned memory of ``num_blocks`` blocks of one layer, contiguous, in the shape of a gather."""
        assert self._staging is not None
        _, keys_and_values, *rest = self._staging.shape
        return self._staging[:num_blocks].view(keys_and_values, num_blocks, *rest)


def zeros_on_host(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in CPU memory that take up space only where they are touched."""
    # numpy takes zeroed pages from the kernel, which come into being when they are touched; torch writes zeros.
    flat = np.zeros(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize, np.uint8)
    return torch.from_numpy(flat).view(dtype).view(shape)


def _columns(pairs: npt.NDArray[np.int32]) -> tuple[Tensor, Tensor]:
    """Both sides of some pairs as int64, copied: the arrays are the core's again after the step."""
    columns = torch.from_numpy(pairs.astype(np.int64).T.copy())
    return columns[0], columns[1]
