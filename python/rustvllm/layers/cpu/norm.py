"""Norms on the CPU by the Rust core: one pass over each row, whose result does not depend on the other rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rustvllm import _core
from rustvllm.layers.cpu.linear import CORE_DTYPES, with_whole_rows
from rustvllm.layers.host_array import host_array
from rustvllm.layers.norm import GemmaRMSNorm, LayerNorm, RMSNorm

NormParts = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32] | None, float]
"""Weight, bias (None for an RMSNorm) and eps."""


class CoreNorm:
    """A LayerNorm, or an RMSNorm if ``bias`` is None; see ``NormKernel``.

    Args:
        threads: The threads that compute.
        weight: ``[features]``, copied.
        bias: ``[features]`` or None, copied.
        eps: Added to the mean of the squares.
    """

    def __init__(self, threads: _core.CpuThreads, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self._threads = threads
        self._weight = weight.to(torch.float32, copy=True).numpy()
        self._bias = None if bias is None else bias.to(torch.float32, copy=True).numpy()
        self._eps = eps

    @property
    def parts(self) -> NormParts:
        """Weight, bias and eps, as the core's decoder takes them."""
        return self._weight, self._bias, self._eps

    def forward(self, x: Tensor) -> Tensor:
        """See ``NormKernel.forward``."""
        rows = with_whole_rows(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]))
        out = torch.empty(rows.shape, dtype=x.dtype)
        if self._bias is None:
            _core.rms_norm(self._threads, host_array(rows), self._weight, self._eps, host_array(out))
        else:
            _core.layer_norm(self._threads, host_array(rows), self._weight, self._bias, self._eps, host_array(out))
        return out if x.dim() == 2 else out.view(x.shape)


def use_core_norms(model: nn.Module, threads: _core.CpuThreads) -> None:
    """Let the core compute every norm of a loaded model that it can."""
    for norm in model.modules():
        if isinstance(norm, LayerNorm | RMSNorm | GemmaRMSNorm) and norm.weight.dtype in CORE_DTYPES:
            weight = norm.weight.to(torch.float32) + 1.0 if isinstance(norm, GemmaRMSNorm) else norm.weight
            bias = norm.bias if isinstance(norm, LayerNorm) else None
            norm.kernel = CoreNorm(threads, weight, bias, norm.eps)
