"""How ranks find each other: torch's store at rank 0, then a process group of their own.

The group is not torch's default one: a program that embeds the engine may have that, and there may be several engines.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from rustvllm import _core
from rustvllm.distributed.rank_group import CollectiveTime, RankGroup
from rustvllm.distributed.stages import RankPlace, Stage, StageLink

HOST = "127.0.0.1"
"""Where the ranks of one machine meet."""
DEFAULT_TIMEOUT_SECONDS = 1800.0
"""Of a collective, as torch has it for gloo."""

_SPIN_US, _CROWDED_SPIN_US = 200, 20


def open_store(world_size: int, timeout_seconds: float) -> c10d.TCPStore:
    """Rank 0's store, on a port of the loopback that the system chooses (``store.port``)."""
    with socket.socket() as listener:  # torch alone would listen on every interface
        listener.bind((HOST, 0))
        listener.listen()
        return c10d.TCPStore(
            HOST,
            listener.getsockname()[1],
            world_size,
            is_master=True,
            timeout=timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def join_store(port: int, world_size: int, timeout_seconds: float) -> c10d.TCPStore:
    """The same as another rank sees it."""
    return c10d.TCPStore(
        HOST, port, world_size, is_master=False, timeout=timedelta(seconds=timeout_seconds), wait_for_workers=False
    )


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


def join(
    store: c10d.Store,
    place: RankPlace,
    device: torch.device,
    timeout_seconds: float,
    time: CollectiveTime | None = None,
    *,
    in_rank_order: bool = False,
    meeting: _core.RankMeeting | None = None,
) -> tuple[RankGroup, Stage]:
    """The ranks that share this one's layers, and its stage; returns when those are there that it has to do with.

    Args:
        store: Where all meet.
        place: Of this rank.
        device: See ``make_group``.
        timeout_seconds: Likewise.
        time: Likewise.
        in_rank_order: Likewise.
        meeting: Likewise.

    Raises:
        RuntimeError: A rank did not come, or the network is not usable.
    """
    spent = CollectiveTime() if time is None else time
    group = RankGroup(time=spent)
    if place.tensor_size > 1:
        own_store = c10d.PrefixStore(f"tp{place.stage}", store)
        group = make_group(
            own_store, place.tensor_rank, place.tensor_size, device, timeout_seconds, spent,
            in_rank_order=in_rank_order, meeting=meeting,
        )  # fmt: skip
    if place.num_stages == 1:
        return group, Stage()
    line = c10d.PrefixStore(f"pp{place.tensor_rank}", store)
    gloo = _gloo(line, place.stage, place.num_stages, timedelta(seconds=timeout_seconds))
    return group, Stage(place.stage, place.num_stages, StageLink(gloo, place.stage, spent))


def make_group(
    store: c10d.Store,
    rank: int,
    size: int,
    device: torch.device,
    timeout_seconds: float,
    time: CollectiveTime | None = None,
    *,
    in_rank_order: bool = False,
    meeting: _core.RankMeeting | None = None,
) -> RankGroup:
    """The group of ranks that share layers; returns when each is there.

    Args:
        store: Where they meet, and nobody else does.
        rank: This one.
        size: How many there are.
        device: NCCL carries tensors of CUDA devices, gloo all others.
        timeout_seconds: How long a collective may take.
        time: Counts what this rank spends in collectives.
        in_rank_order: See ``RankGroup``.
        meeting: Likewise.

    Raises:
        RuntimeError: A rank did not come, or the network is not usable.
    """
    timeout = timedelta(seconds=timeout_seconds)
    group = dist.ProcessGroup(store, rank, size)
    backend: Any
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout  # noqa: SLF001 -- torch has no other name for it
        backend = dist.ProcessGroupNCCL(store, rank, size, options)
        kind = dist.ProcessGroup.BackendType.NCCL
    else:
        backend = _gloo(store, rank, size, timeout)
        kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)  # noqa: SLF001 -- what torch's own new_group calls
    group._register_backend(torch.device(device.type), kind, backend)  # noqa: SLF001 -- likewise
    spent = CollectiveTime() if time is None else time
    return RankGroup(rank, size, group, in_rank_order, meeting, timeout_seconds, spent)


def _gloo(store: c10d.Store, rank: int, size: int, timeout: timedelta) -> c10d.ProcessGroupGloo:
    """Gloo on the loopback alone: its connections know no secret."""
    kind: Any = c10d.ProcessGroupGloo  # the stub lacks its options
    options = kind._Options()  # noqa: SLF001 -- torch has no other names for these
    options._devices = [kind.create_device(hostname=HOST)]  # noqa: SLF001 -- likewise
    options._timeout = timeout  # noqa: SLF001 -- likewise
    options._threads = 1  # noqa: SLF001 -- likewise
    group: c10d.ProcessGroupGloo = kind(store, rank, size, options)
    return group
