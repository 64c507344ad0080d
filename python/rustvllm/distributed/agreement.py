"""A check for tests (``RUSTVLLM_CHECK_INVARIANTS``): after each forward pass all ranks hold the same hidden states."""

from typing import Any

import torch
from torch import Tensor, nn

from rustvllm.distributed.rank_group import RankGroup
from rustvllm.exceptions import SchedulerStateError

TOLERANCE = 1e-3
"""Of the sum of a token's numbers, relative to their sizes: additions in another order pass, another step does not."""


def watch(model: nn.Module, group: RankGroup) -> None:
    """Compare what the model gives with what it gives on the other ranks, from now on.

    Args:
        model: Its forward pass gives hidden states ``[num_tokens, hidden_size]``, the same on each rank.
        group: Of these ranks; the comparison is a collective, so each must watch.
    """
    if group.size > 1:
        model.register_forward_hook(lambda _module, _arguments, hidden: _compare(hidden, group))


def _compare(hidden: Any, group: RankGroup) -> None:
    assert isinstance(hidden, Tensor)
    numbers = hidden.double()
    places = torch.linspace(0.5, 1.5, numbers.shape[-1], dtype=torch.float64)
    shape = torch.zeros(2, dtype=torch.float64)
    shape[0], shape[1] = numbers.shape[0], numbers.abs().sum()
    shapes = group.all_gather(shape)
    if not torch.equal(shapes[:, 0], shapes[0, 0].expand(group.size)):
        raise SchedulerStateError(f"the ranks ran {shapes[:, 0].long().tolist()} tokens in one step")
    sums = group.all_gather((numbers * places).sum(dim=-1))
    if (sums - sums[0]).abs().max() > TOLERANCE * (1 + shapes[:, 1].max() / max(1, numbers.shape[0])):
        raise SchedulerStateError(f"the hidden states of the ranks differ: {sums.tolist()!r:.200}")
