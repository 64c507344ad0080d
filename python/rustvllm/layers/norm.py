"""LayerNorm and RMSNorm over the last dimension, alone or fused with the addition before them."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rustvllm.layers.fused import runs_fused
from rustvllm.layers.linear import Linear, empty_parameter


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
    """``x / sqrt(mean(x²) + eps) · weight``, computed in float32 for any dtype of ``x``."""

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


def add_norm(
    norm: nn.Module | None, x: Tensor, residual: Tensor, post_norm: nn.Module | None = None
) -> tuple[Tensor, Tensor]:
    """A norm of ``residual + post_norm(x)``, and that sum; on a GPU in one kernel.

    Args:
        norm: ``RMSNorm``, ``GemmaRMSNorm`` or ``LayerNorm``; None: returns the sum twice.
        x: ``[..., hidden_size]``.
        residual: ``[..., hidden_size]``.
        post_norm: An ``RMSNorm`` or ``GemmaRMSNorm``; None: ``x`` is added unchanged.
    """
    if runs_fused(x):
        from rustvllm.kernels import norm as kernels

        if isinstance(norm, RMSNorm | GemmaRMSNorm) and isinstance(post_norm, type(norm)) and norm.eps == post_norm.eps:
            weights, offset = (post_norm.weight, norm.weight), norm.weight_offset
            return kernels.norm_add_rms_norm(x, residual, *weights, norm.eps, weight_offset=offset)
        if isinstance(norm, RMSNorm | GemmaRMSNorm) and post_norm is None:
            return kernels.add_rms_norm(x, residual, norm.weight, norm.eps, weight_offset=norm.weight_offset)
        if isinstance(norm, LayerNorm) and post_norm is None:
            return kernels.add_layer_norm(x, residual, norm.weight, norm.bias, norm.eps)
    total = residual + (x if post_norm is None else post_norm(x))
    return total if norm is None else norm(total), total


def linear_add_norm(linear: Linear, x: Tensor, residual: Tensor, norm: nn.Module | None) -> tuple[Tensor, Tensor]:
    """A norm of ``residual + linear(x)``, and that sum; in as few kernels as the device needs.

    Args:
        linear: Maps ``x`` to the width of the residual.
        x: ``[..., in_features]``.
        residual: ``[..., hidden_size]``; not overwritten.
        norm: See ``add_norm``.
    """
    if runs_fused(x):
        return add_norm(norm, linear(x), residual)
    total: Tensor = linear(x, residual=residual)
    return total if norm is None else norm(total), total
