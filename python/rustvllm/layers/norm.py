"""LayerNorm and RMSNorm over the last dimension."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rustvllm.layers.fused import runs_fused
from rustvllm.layers.linear import empty_parameter


class NormKernel(Protocol):
    """Computes a norm from a copy of its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., features]`` → the same shape, in new memory."""
        ...


class LayerNorm(nn.Module):
    """``(x − mean) / sqrt(var + eps) · weight + bias`` over the last dimension."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(hidden_size)
        self.bias = empty_parameter(hidden_size)
        self.kernel: NormKernel | None = None

    def forward(self, x: Tensor) -> Tensor:  # [..., hidden_size] -> the same
        if self.kernel is not None:
            return self.kernel.forward(x)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class PlainLayerNorm(nn.Module):
    """``(x − mean) / sqrt(var + eps)`` over the last dimension: a LayerNorm without parameters."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:  # [..., hidden_size] -> the same
        return F.layer_norm(x, (self.hidden_size,), eps=self.eps)


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x²) + eps) · weight``, computed in float32 whatever the dtype of ``x``."""

    weight_offset = 0.0

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(hidden_size)
        self.kernel: NormKernel | None = None

    def forward(self, x: Tensor) -> Tensor:  # [..., hidden_size] -> the same
        if self.kernel is not None:
            return self.kernel.forward(x)
        if runs_fused(x):
            from rustvllm.kernels.norm import rms_norm

            return rms_norm(x, self.weight, self.eps)
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        x32 = x.to(torch.float32)
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * x32.to(x.dtype)


class GemmaRMSNorm(nn.Module):
    """``x / sqrt(mean(x²) + eps) · (1 + weight)``, computed in float32 and rounded once at the end."""

    weight_offset = 1.0

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(hidden_size)
        self.kernel: NormKernel | None = None

    def forward(self, x: Tensor) -> Tensor:  # [..., hidden_size] -> the same
        if self.kernel is not None:
            return self.kernel.forward(x)
        if runs_fused(x):
            from rustvllm.kernels.norm import rms_norm

            return rms_norm(x, self.weight, self.eps, weight_offset=1.0)
        weight = self.weight.to(torch.float32) + 1.0
        return F.rms_norm(x.to(torch.float32), weight.shape, weight, self.eps).to(x.dtype)
