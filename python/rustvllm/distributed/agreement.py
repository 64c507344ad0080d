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
    shape, of_tokens = digests(hidden)
    shapes = group.all_gather(shape)
    if not torch.equal(shapes[:, 0], shapes[0, 0].expand(group.size)):
        raise SchedulerStateError(f"the ranks ran {shapes[:, 0].long().tolist()} tokens in one step")
    sums = group.all_gather(of_tokens)
    if (sums - sums[0]).abs().max() > TOLERANCE * (1 + shapes[:, 1].max() / max(1, hidden.shape[0])):
        raise SchedulerStateError(f"the hidden states of the ranks differ: {sums.tolist()!r:.200}")


def digests(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """What ranks compare of hidden states ``[num_tokens, hidden_size]``, on their device: a group of GPUs gathers that.

    Returns:
        float64 ``[2]``: the tokens, and the sizes of all numbers; float64 ``[num_tokens]``: a sum of each token's.
    """
    numbers = hidden.double()
    places = torch.linspace(0.5, 1.5, numbers.shape[-1], dtype=torch.float64, device=hidden.device)
    num_tokens = torch.full((), numbers.shape[0], dtype=torch.float64, device=hidden.device)
    return torch.stack((num_tokens, numbers.abs().sum())), (numbers * places).sum(dim=-1)
