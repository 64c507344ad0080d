"""How ranks find each other: they meet at torch's store on rank 0 and make process groups of their own.

These are not torch's default group, which a program that embeds the engine may use itself. Several engines in one
program do not share groups either.
"""

from __future__ import annotations

import contextlib
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from rustvllm import _core
from rustvllm.distributed.collective_time import CollectiveTime
from rustvllm.distributed.rank_group import RankGroup
from rustvllm.distributed.stages import RankPlace, Stage, StageLink

HOST = "127.0.0.1"
"""The address where the ranks of one machine meet."""
_SILENCE_MILLISECONDS = 5000
"""How long a peer may not acknowledge before the kernel ends the connection.

The same as for the connection of two nodes (``crates/step-channel/src/node_link.rs``).
"""
DEFAULT_TIMEOUT_SECONDS = 1800.0
"""How long a collective may take: torch's default for gloo."""


def open_store(world_size: int, timeout_seconds: float, host: str = HOST) -> c10d.TCPStore:
    """Open the store on rank 0. It listens on ``host``, on a port that the system chooses (``store.port``)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:  # torch alone would listen on every interface
        listener.bind((host, 0))
        listener.listen()
        return c10d.TCPStore(
            host,
            listener.getsockname()[1],
            world_size,
            is_master=True,
            timeout=timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def join_store(port: int, world_size: int, timeout_seconds: float, host: str = HOST) -> c10d.TCPStore:
    """Connect to rank 0's store, as another rank."""
    return c10d.TCPStore(
        host, port, world_size, is_master=False, timeout=timedelta(seconds=timeout_seconds), wait_for_workers=False
    )


def join(
    store: c10d.Store,
    place: RankPlace,
    device: torch.device,
    timeout_seconds: float,
    time: CollectiveTime | None = None,
    *,
    in_rank_order: bool = False,
    meeting: _core.RankMeeting | None = None,
    host: str = HOST,
) -> tuple[RankGroup, Stage]:
    """Make the groups of a rank. Blocks until the ranks of these groups have joined.

    Args:
        store: The store where all ranks meet.
        place: The part of the model that this rank holds.
        device: See ``make_group``.
        timeout_seconds: See ``make_group``.
        time: See ``make_group``.
        in_rank_order: See ``make_group``.
        meeting: See ``make_group``.
        host: See ``make_group``.

    Returns:
        The ranks that share this rank's layers, and its stage with the link to its neighbours.

    Raises:
        RuntimeError: A rank did not join in time, or the network cannot be used.
    """
    spent = CollectiveTime() if time is None else time
    before = _descriptors()
    group = RankGroup(time=spent)
    if place.tensor_size > 1:
        own_store = c10d.PrefixStore(f"tp{place.stage}", store)
        group = make_group(
            own_store, place.tensor_rank, place.tensor_size, device, timeout_seconds, spent,
            in_rank_order=in_rank_order, meeting=meeting, host=host,
        )  # fmt: skip
    if place.num_stages == 1:
        _notice_silence(host, before)
        return group, Stage()
    line = c10d.PrefixStore(f"pp{place.tensor_rank}", store)
    gloo = _gloo(line, place.stage, place.num_stages, timedelta(seconds=timeout_seconds), host)
    _notice_silence(host, before)
    return group, Stage(place.stage, place.num_stages, StageLink(gloo, place.stage, spent))


def _descriptors() -> set[int]:
    return {int(place.name) for place in Path("/proc/self/fd").iterdir()}


def _notice_silence(host: str, before: set[int]) -> None:
    """Make the kernel end connections to machines that vanish without closing them; gloo would wait forever.

    Args:
        host: This rank's address. On ``HOST`` there is nothing to do: peers on this machine cannot vanish like that.
        before: Descriptors that were open before gloo connected; all newer ones are its connections.
    """
    for number in _descriptors() - before if host != HOST else ():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            if connection.getsockname()[0] == host and connection.getpeername():
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_MILLISECONDS)


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
    host: str = HOST,
    by_gloo: bool = False,
) -> RankGroup:
    """Make the group of the ranks that share layers. Blocks until all of them have joined.

    Args:
        store: A store that only these ranks use.
        rank: Number of this rank in the group.
        size: Number of ranks in the group.
        device: NCCL carries tensors of CUDA devices, gloo all others.
        timeout_seconds: How long a collective may take.
        time: Counts the time that this rank spends in collectives.
        in_rank_order: See ``RankGroup``.
        meeting: See ``RankGroup``.
        host: This rank's address; gloo listens there.
        by_gloo: Let gloo carry CUDA tensors too, through the host's memory, so that several ranks can share a device.

    Raises:
        RuntimeError: A rank did not join in time, or the network cannot be used.
    """
    timeout = timedelta(seconds=timeout_seconds)
    group = dist.ProcessGroup(store, rank, size)
    backend: Any
    if device.type == "cuda" and not by_gloo:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout  # noqa: SLF001 -- torch has no other name for it
        backend = dist.ProcessGroupNCCL(store, rank, size, options)
        kind = dist.ProcessGroup.BackendType.NCCL
    else:
        backend = _gloo(store, rank, size, timeout, host)
        kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)  # noqa: SLF001 -- what torch's own new_group calls
    group._register_backend(torch.device(device.type), kind, backend)  # noqa: SLF001 -- likewise
    spent = CollectiveTime() if time is None else time
    return RankGroup(rank, size, group, in_rank_order, meeting, timeout_seconds, spent)


def _gloo(store: c10d.Store, rank: int, size: int, timeout: timedelta, host: str) -> c10d.ProcessGroupGloo:
    """Make a gloo backend that listens on ``host`` only, because its connections are not authenticated."""
    kind: Any = c10d.ProcessGroupGloo  # the stub lacks its options
    options = kind._Options()  # noqa: SLF001 -- torch has no other names for these
    options._devices = [kind.create_device(hostname=host)]  # noqa: SLF001 -- likewise
    options._timeout = timeout  # noqa: SLF001 -- likewise
    options._threads = 1  # noqa: SLF001 -- likewise
    group: c10d.ProcessGroupGloo = kind(store, rank, size, options)
    return group
