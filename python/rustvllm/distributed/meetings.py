"""Meetings: memory through which the CPU ranks of one machine add and gather (``_core.RankMeeting``)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rustvllm import _core

if TYPE_CHECKING:
    from rustvllm.distributed.nodes import NodeShare

_SPIN_US, _CROWDED_SPIN_US = 200, 20


def make_meetings(share: NodeShare, device: str) -> dict[int, _core.RankMeeting]:
    """A meeting for each stage whose ranks are all on this machine, by stage; GPUs and single ranks need none.

    Args:
        share: Of this machine.
        device: ``cpu`` or ``cuda``.
    """
    if device != "cpu" or share.tensor_size == 1:
        return {}
    return {stage: make_meeting(share.tensor_size, len(share.ranks)) for stage in share.own_stages}


def make_meeting(size: int, num_processes: int | None = None) -> _core.RankMeeting:
    """Memory that CPU ranks of this machine share, as their first sees it; the others inherit its descriptor.

    Args:
        size: Ranks that meet.
        num_processes: That compute at the same time; None: these.
    """
    return _core.RankMeeting(size, spin_us=_spin_us(num_processes or size))


def join_meeting(fd: int, rank: int, num_processes: int) -> _core.RankMeeting:
    """The same as another rank sees it."""
    return _core.RankMeeting.join(fd, rank, spin_us=_spin_us(num_processes))


def _spin_us(num_processes: int) -> int:
    """How long a rank looks for another: a moment where that may need its processor, else longer than ranks differ."""
    return _SPIN_US if len(os.sched_getaffinity(0)) >= num_processes else _CROWDED_SPIN_US
