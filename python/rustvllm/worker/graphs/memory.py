"""Estimates how much memory CUDA graphs will take, from the first few of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

SEGMENT_BYTES = 20 << 20
"""How much memory torch takes from the device at a time for tensors of 1 to 10 MiB."""


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Memory of a device at one moment, in bytes.

    Attributes:
        free: Memory that no process has.
        reserved: Memory that torch has, in use or not.
        allocated: The part of it that is in use.
    """

    free: int
    reserved: int
    allocated: int

    @classmethod
    def of(cls, device: torch.device) -> MemoryReading:
        """Read the current figures."""
        free = torch.cuda.mem_get_info(device)[0]
        return cls(free, torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device))


def graph_bytes(readings: Sequence[MemoryReading], num_graphs: int) -> int:
    """The bytes that ``num_graphs`` graphs take that share a pool of memory.

    The largest graph counts in full. Each other one needs what the driver keeps for it, and the part of the pool that
    stays in use; the pool grows by whole segments, and one segment may serve many graphs.

    Args:
        readings: Before the largest was captured, after it, and after each of a few more.
        num_graphs: The total number of graphs.
    """
    if len(readings) < 2:
        return 0
    largest = max(0, readings[0].free - readings[1].free)
    driver = kept = 0
    for before, after in itertools.pairwise(readings[1:]):
        driver = max(driver, (before.free - after.free) - (after.reserved - before.reserved))
        kept = max(kept, after.allocated - before.allocated)
    segments = -(-kept * (num_graphs - 1) // SEGMENT_BYTES)
    return largest + driver * (num_graphs - 1) + segments * SEGMENT_BYTES
