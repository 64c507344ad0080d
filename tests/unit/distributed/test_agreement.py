"""Ranks compare hidden states on their own device; another step is an error, another order of additions is not."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rustvllm.distributed import agreement
from rustvllm.exceptions import SchedulerStateError


def test_digests_lie_on_the_device_of_the_hidden_states() -> None:
    with FakeTensorMode():
        for made in agreement.digests(torch.empty((3, 4), dtype=torch.bfloat16, device="cuda")):
            assert made.device.type == "cuda", "NCCL takes no tensor of the host"


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (torch.eye(3, 4), None),
        (torch.eye(3, 4) + 1e-7, None),
        (torch.eye(2, 4), r"ran \[3, 2\] tokens"),
        (torch.eye(3, 4).flip(1), "hidden states of the ranks differ"),
    ],
)
def test_another_step_is_told_from_another_order_of_sums(other: torch.Tensor, says: str | None) -> None:
    """Runs rank 0's comparison; the other rank gathers the same values."""
    of_other = iter(agreement.digests(other))
    group: Any = SimpleNamespace(size=2, all_gather=lambda own: torch.stack([own, next(of_other)]))
    model = torch.nn.Identity()
    agreement.watch(model, group)
    if says is None:
        model(torch.eye(3, 4))
    else:
        with pytest.raises(SchedulerStateError, match=says):
            model(torch.eye(3, 4))
