"""Stages: groups of layers, one after the other, each with ranks of its own, and how hidden states go between them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rustvllm.distributed.collective_time import CollectiveTime
from rustvllm.distributed.rank_group import timed
from rustvllm.exceptions import ModelLoadError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroupGloo, Work

_TAG = 0
_MOST_ON_THE_WAY = 16
"""Steps that a stage has sent and the next one has not taken, before it waits: no more can be under way."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Which part of a model a rank holds. The last stage is rank 0's: sampling stays in the engine's process.

    Attributes:
        rank: Of the process, from 0.
        tensor_size: Ranks that share each layer.
        num_stages: Groups of layers.
    """

    rank: int
    tensor_size: int
    num_stages: int

    @property
    def stage(self) -> int:
        """Which group of layers, from 0."""
        return self.num_stages - 1 - self.rank // self.tensor_size

    @property
    def tensor_rank(self) -> int:
        """Which part of each layer, from 0."""
        return self.rank % self.tensor_size


ONE_STAGE = RankPlace(0, 64, 1)
"""Rank 0's place where all ranks, however many, share every layer."""


class StageLink:
    """Takes hidden states from the stage before and hands them to the one after.

    Both know how many rows a step has, so that nothing but the numbers goes over; steps come in order.

    Args:
        group: The ranks that hold the same part of each stage's layers, in the order of stages.
        stage: Of this rank.
        time: Counts what is waited for.
    """

    def __init__(self, group: ProcessGroupGloo, stage: int, time: CollectiveTime) -> None:
        self._group: Any = group  # the stub lacks what it sends by
        self._stage, self._time = stage, time
        self._on_the_way: deque[tuple[Work, Tensor]] = deque()

    def receive(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """What the stage before gives for a step, ``[num_rows, width]``."""
        hidden = torch.empty((num_rows, width), dtype=dtype)
        with timed(self._time, "receive"):
            self._group.recv([_as_bytes(hidden)], self._stage - 1, _TAG).wait()
        return hidden

    def send(self, hidden: Tensor) -> None:
        """Hand a step's rows on without waiting for the next stage; they must not change any more."""
        sent = self._on_the_way
        with timed(self._time, "send"):
            while len(sent) >= _MOST_ON_THE_WAY or (sent and sent[0][0].is_completed()):
                sent.popleft()[0].wait()
            numbers = _as_bytes(hidden.contiguous())
            sent.append((self._group.send([numbers], self._stage + 1, _TAG), numbers))


@dataclass(frozen=True, slots=True)
class Stage:
    """A group of layers as one of its ranks sees it; ``WHOLE`` is all of them.

    Attributes:
        index: From 0, in the order in which tokens pass them.
        count: How many there are.
        link: To the others; None: there are none, or the model only is to be looked at.
    """

    index: int = 0
    count: int = 1
    link: StageLink | None = None

    @property
    def is_first(self) -> bool:
        """Whether it embeds tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it computes logits."""
        return self.index == self.count - 1

    def own(self, num_layers: int) -> range:
        """Its layers, of so many. Where they cannot be shared evenly, the last stage, which has the head, has fewer.

        Raises:
            ModelLoadError: There are more stages than layers.
        """
        if self.count > num_layers:
            raise ModelLoadError(
                f"--pipeline-parallel-size {self.count} is more than the {num_layers} layers of this model; at most "
                f"{num_layers} would work"
            )
        each, more = divmod(num_layers, self.count)
        first = self.index * each + min(self.index, more)
        return range(first, first + each + (self.index < more))

    def receive(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """What the stage before gives; see ``StageLink``."""
        if self.link is None:
            raise RuntimeError("a stage was run without the one before it")
        return self.link.receive(num_rows, width, dtype)

    def hand_on(self, hidden: Tensor) -> None:
        """Send what this stage gives to the next one, if there is one."""
        if not self.is_last and self.link is not None:
            self.link.send(hidden)


def _as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory: gloo knows some types only."""
    return tensor.detach().view(-1).view(torch.uint8)


WHOLE = Stage()
"""One process, or each rank of one group, runs all layers."""
