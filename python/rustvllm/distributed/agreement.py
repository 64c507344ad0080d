"""Checks after each forward pass that all ranks hold the same hidden states (``RUSTVLLM_CHECK_INVARIANTS``)."""

from typing import Any

import torch
from torch import Tensor, nn

from rustvllm.distributed.rank_group import RankGroup
from rustvllm.exceptions import SchedulerStateError

TOLERANCE = 1e-3
"""Allowed difference between two ranks' sums of a token, relative to the mean size of a token's numbers.

Sums that were added in another order stay within it; the hidden states of another step do not.
"""


def watch(model: nn.Module, group: RankGroup) -> None:
    """From now on, compare the model's hidden states with those of the other ranks after each forward pass.

    Args:
        model: Its forward pass returns hidden states ``[num_tokens, hidden_size]``, the same on each rank.
        group: The ranks to compare with. The comparison is a collective, so each of them must call ``watch``.
    """
    if group.size > 1:
        model.register_forward_hook(lambda _module, _arguments, hidden: _compare(hidden, group))


def _compare(hidden: Any, group: RankGroup) -> None:
    assert isinstance(hidden, Tensor)
    shape, of_tokens = digests(hidden)
    shapes = group.all_gather(shape)
    if not torch.equal(shapes[:, 0], shapes[0, 0].expand(group.size)):
        raise SchedulerStateError(f"the ranks ran {shapes[:, 0].long().tolist()} tokens in the same step")
    sums = group.all_gather(of_tokens)
    if (sums - sums[0]).abs().max() > TOLERANCE * (1 + shapes[:, 1].max() / max(1, hidden.shape[0])):
        raise SchedulerStateError(f"the hidden states of the ranks differ: {sums.tolist()!r:.200}")


def digests(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Reduce hidden states ``[num_tokens, hidden_size]`` to what ranks compare.

    The results stay on the device of the hidden states, because NCCL cannot gather tensors of the host.

    Returns:
        float64 ``[2]``: the number of tokens, and the sum of the absolute values of all numbers; float64
        ``[num_tokens]``: a weighted sum of each token's numbers.
    """
    numbers = hidden.double()
    places = torch.linspace(0.5, 1.5, numbers.shape[-1], dtype=torch.float64, device=hidden.device)
    num_tokens = torch.full((), numbers.shape[0], dtype=torch.float64, device=hidden.device)
    return torch.stack((num_tokens, numbers.abs().sum())), (numbers * places).sum(dim=-1)
