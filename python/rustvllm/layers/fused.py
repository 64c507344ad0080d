"""Decides where a layer runs as one Triton kernel instead of several torch operations: on a GPU that has Triton."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from rustvllm import envs


def runs_fused(x: Tensor) -> bool:
    """Whether a layer's input goes to ``rustvllm.kernels``; if not, that package need not even be importable."""
    return _runs_fused(x.device)


def runs_fused_on(device: torch.device) -> bool:
    """The answer of ``runs_fused`` for tensors on ``device``."""
    return _runs_fused(device)


@functools.cache
def _runs_fused(device: torch.device) -> bool:
    if envs.triton_interpret():
        return device.type == "cpu"
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    from rustvllm.kernels import tuning

    return tuning.capability(device) >= tuning.MIN_CAPABILITY and tuning.why_no_toolchain() is None
