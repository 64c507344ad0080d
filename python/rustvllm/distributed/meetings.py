"""Meetings: shared memory in which the CPU ranks of one machine add and gather tensors (``_core.RankMeeting``)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rustvllm import _core

if TYPE_CHECKING:
    from rustvllm.distributed.nodes import NodeShare

_SPIN_US, _CROWDED_SPIN_US = 200, 20


def make_meetings(share: NodeShare, device: str) -> dict[int, _core.RankMeeting]:
    """Make a meeting for each stage that has all its ranks on this machine; none for GPUs or stages of one rank.

    Args:
        share: The ranks of this machine.
        device: ``cpu`` or ``cuda``.

    Returns:
        The meetings by stage.
    """
    if device != "cpu" or share.tensor_size == 1:
        return {}
    return {stage: make_meeting(share.tensor_size, len(share.ranks)) for stage in share.own_stages}


def make_meeting(size: int, num_processes: int | None = None) -> _core.RankMeeting:
    """Make a meeting for CPU ranks of this machine, as its rank 0; the other ranks inherit the descriptor and join.

    Args:
        size: Number of ranks that meet.
        num_processes: Number of processes that compute at the same time; None: as many as meet.
    """
    return _core.RankMeeting(size, spin_us=_spin_us(num_processes or size))


def join_meeting(fd: int, rank: int, num_processes: int) -> _core.RankMeeting:
    """Join a meeting by its descriptor, as one of its other ranks."""
    return _core.RankMeeting.join(fd, rank, spin_us=_spin_us(num_processes))


def _spin_us(num_processes: int) -> int:
    """How long a rank may spin while it waits for another, before it sleeps; in microseconds.

    With a processor for each process, this is longer than ranks usually wait. With fewer, it is short, because the
    other rank may need this processor.
    """
    return _SPIN_US if len(os.sched_getaffinity(0)) >= num_processes else _CROWDED_SPIN_US
