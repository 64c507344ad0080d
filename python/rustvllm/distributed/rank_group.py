"""``RankGroup``: the ranks that share each layer of a model, and the collectives that its layers call."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from rustvllm.distributed.collective_time import CollectiveTime

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from rustvllm import _core

_ADDED_IN_MEETINGS = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The group as one of its ranks sees it. ``ALONE`` is the group of one rank, in which collectives do nothing.

    Attributes:
        rank: Number of this process in the group, from 0.
        size: Number of ranks in the group.
        group: torch's process group; None if there is one rank.
        in_rank_order: Whether groups of more than two ranks add in the order of the ranks, which makes sums
            reproducible bit by bit.
        meeting: Shared memory that carries CPU tensors and always adds in the order of the ranks; None: torch carries
            all tensors.
        timeout_seconds: How long a meeting waits for a rank.
        time: Counts the time in collectives.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    in_rank_order: bool = False
    meeting: _core.RankMeeting | None = field(default=None, compare=False)
    timeout_seconds: float = 1800.0
    time: CollectiveTime = field(default_factory=CollectiveTime, compare=False)

    def all_reduce(self, tensor: Tensor, layer: int = -1) -> Tensor:
        """Add over all ranks, in place.

        Args:
            tensor: This rank's summand, of any shape, the same on each rank; overwritten with the sum.
            layer: The model's layer that the sum belongs to, for reports of a rank that waits too long; -1: none.

        Returns:
            ``tensor``.
        """
        if self.group is None:
            return tensor
        self.time.layer = layer
        if self.meeting is not None and tensor.dtype in _ADDED_IN_MEETINGS and tensor.is_contiguous():
            with timed(self.time, "all_reduce"):
                numbers = tensor.detach()
                numbers = numbers.view(torch.uint16) if tensor.dtype == torch.bfloat16 else numbers
                self.meeting.all_reduce(numbers.numpy(), self.timeout_seconds)
            return tensor
        if self.in_rank_order and self.size > 2:  # two terms have one order
            first, *others = self.all_gather(tensor)
            for other in others:
                first += other
            return tensor.copy_(first)
        with timed(self.time, "all_reduce"):
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Gather every rank's tensor on every rank: ``[size, *tensor.shape]``, in the order of the ranks."""
        if self.group is None:
            return tensor[None]
        out = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        with timed(self.time, "all_gather"):
            if self.meeting is not None:
                self.meeting.gather(_bytes(tensor), _bytes(out), self.timeout_seconds)
                return out
            dist.all_gather_into_tensor(out.view(-1), tensor.contiguous().view(-1), group=self.group)
        return out

    def gather(self, tensor: Tensor) -> Tensor | None:
        """Gather every rank's tensor on rank 0: ``[size, *tensor.shape]``, in the order of ranks; None elsewhere."""
        if self.group is None:
            return tensor[None]
        is_first = self.rank == 0
        out = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device) if is_first else None
        with timed(self.time, "gather"):
            if self.meeting is not None:
                own, all_bytes = _bytes(tensor), None if out is None else _bytes(out)
                self.meeting.gather(own, all_bytes, self.timeout_seconds, to_first=True)
                return out
            dist.gather(tensor.contiguous(), None if out is None else list(out), group=self.group, group_dst=0)
        return out

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrite ``tensor`` (any shape, the same on each rank) with rank 0's, and return it."""
        if self.group is None:
            return tensor
        with timed(self.time, "broadcast"):
            if self.meeting is not None:
                out = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype)
                self.meeting.gather(_bytes(tensor), _bytes(out), self.timeout_seconds)
                return tensor.copy_(out[0])
            dist.broadcast(tensor, group=self.group, group_src=0)
        return tensor

    def share(self, total: int) -> int:
        """The number of parts that each rank holds if ``total`` parts are divided evenly.

        Raises:
            ValueError: ``total`` is not a multiple of the group's size.
        """
        if total % self.size:
            raise ValueError(f"{self.size} ranks cannot share {total} parts evenly")
        return total // self.size


def _bytes(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """View a CPU tensor's memory as bytes; a tensor that is not contiguous is copied."""
    array: npt.NDArray[np.uint8] = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return array


class timed:  # noqa: N801 -- read as a word of the statement that it begins
    """Context that counts the collective in its body and times it."""

    __slots__ = ("_begin", "_name", "_time")

    def __init__(self, spent: CollectiveTime, name: str) -> None:
        self._time, self._name = spent, name

    def __enter__(self) -> None:
        self._time.current = self._name
        self._begin = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._time.seconds += time.perf_counter() - self._begin
        self._time.calls += 1
        self._time.current = ""


ALONE = RankGroup()
"""One process holds the whole model."""
