"""Where layers run as one Triton kernel each, rather than as several operations of torch: on a GPU that has Triton."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from rustvllm import envs


def runs_fused(x: Tensor) -> bool:
    """Whether a layer's input is for ``rustvllm.kernels``; if not, that package need not even be importable."""
    return _runs_fused(x.device)


def runs_fused_on(device: torch.device) -> bool:
    """As ``runs_fused``, of what lies on a device."""
    return _runs_fused(device)


@functools.cache
def _runs_fused(device: torch.device) -> bool:
    if envs.triton_interpret():
        return device.type == "cpu"
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    from rustvllm.kernels import tuning

    return tuning.capability(device) >= tuning.MIN_CAPABILITY and tuning.why_no_toolchain() is None
