"""Pipeline stages: consecutive groups of layers with their own ranks, and the hidden states that pass between them."""

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
"""Steps that a stage may send ahead of what the next stage has received; then it waits."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The part of a model that a rank holds. Rank 0 has the last stage, so that the engine's process samples.

    Attributes:
        rank: Number of the process, from 0.
        tensor_size: Number of ranks that share each layer.
        num_stages: Number of groups of layers.
    """

    rank: int
    tensor_size: int
    num_stages: int

    @property
    def stage(self) -> int:
        """Number of its group of layers, from 0."""
        return self.num_stages - 1 - self.rank // self.tensor_size

    @property
    def tensor_rank(self) -> int:
        """Number of its part of each layer, from 0."""
        return self.rank % self.tensor_size


ONE_STAGE = RankPlace(0, 64, 1)
"""Rank 0's place without pipeline stages: all ranks (at most 64) share every layer."""


class StageLink:
    """Receives hidden states from the previous stage and sends them to the next one.

    Both sides know how many rows a step has, so only the numbers are sent. Steps arrive in order.

    Args:
        group: The ranks that hold the same part of each stage's layers, in the order of the stages.
        stage: The stage of this rank.
        time: Counts the time spent waiting.
    """

    def __init__(self, group: ProcessGroupGloo, stage: int, time: CollectiveTime) -> None:
        self._group: Any = group  # torch's stub lacks send and recv
        self._stage, self._time = stage, time
        self._on_the_way: deque[tuple[Work, Tensor]] = deque()

    def receive(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Wait for the previous stage's hidden states of a step, ``[num_rows, width]``."""
        hidden = torch.empty((num_rows, width), dtype=dtype)
        with timed(self._time, "receive"):
            self._group.recv([_as_bytes(hidden)], self._stage - 1, _TAG).wait()
        return hidden

    def send(self, hidden: Tensor) -> None:
        """Send a step's rows to the next stage. Waits only if that is far behind; the rows must not change any more."""
        sent = self._on_the_way
        with timed(self._time, "send"):
            while len(sent) >= _MOST_ON_THE_WAY or (sent and sent[0][0].is_completed()):
                sent.popleft()[0].wait()
            numbers = _as_bytes(hidden.contiguous())
            sent.append((self._group.send([numbers], self._stage + 1, _TAG), numbers))


@dataclass(frozen=True, slots=True)
class Stage:
    """A group of layers as one of its ranks sees it; ``WHOLE`` is the only stage of a model without stages.

    Attributes:
        index: Number of the stage, from 0, in the order in which tokens pass them.
        count: Number of stages.
        link: The link to the neighbouring stages; None if there is one stage, or the model is built but not run.
    """

    index: int = 0
    count: int = 1
    link: StageLink | None = None

    @property
    def is_first(self) -> bool:
        """Whether this stage embeds the tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the logits."""
        return self.index == self.count - 1

    def own(self, num_layers: int) -> range:
        """The layers of this stage, out of ``num_layers``.

        If they cannot be divided evenly, the last stages have one layer fewer; the last one also has the head.

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
        """See ``StageLink.receive``."""
        if self.link is None:
            raise RuntimeError(f"stage {self.index} cannot run: it has no link to stage {self.index - 1}")
        return self.link.receive(num_rows, width, dtype)

    def hand_on(self, hidden: Tensor) -> None:
        """Send this stage's hidden states to the next stage, if there is one; see ``StageLink.send``."""
        if not self.is_last and self.link is not None:
            self.link.send(hidden)


def _as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor's memory as bytes, because gloo supports only some dtypes."""
    return tensor.detach().view(-1).view(torch.uint8)


WHOLE = Stage()
"""One process, or each rank of one group, runs all layers."""
