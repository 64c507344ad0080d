"""RMSNorm and LayerNorm over rows, alone or together with the addition before them.

One program computes a row and reads it once: mean and variance use the loaded values. Sums are in float32, in an order
that does not depend on the number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rustvllm.kernels.tuning import LAUNCH_OPTIONS, power_of_two


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0) -> Tensor:
    """``x / sqrt(mean(x²) + eps) · (weight + weight_offset)``.

    Without an offset the quotient is rounded to the dtype of ``x`` before the multiplication; with one, everything is
    computed in float32 (as in Gemma).

    Args:
        x: ``[..., hidden_size]``, contiguous.
        weight: ``[hidden_size]``.
        eps: Added to the mean.
        weight_offset: Added to the weight.

    Returns:
        Shaped like ``x``.
    """
    return _norm(x, None, weight, None, eps, weight_offset, is_rms=True)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """``rms_norm`` of ``x + residual``, and the sum itself, rounded to the dtype of ``x`` before the norm."""
    return _norm(x, residual, weight, None, eps, weight_offset, is_rms=True)


def norm_add_rms_norm(
    x: Tensor, residual: Tensor, post_weight: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """``add_rms_norm`` of ``rms_norm(x, post_weight)``, which is rounded before it is added to the residual."""
    return _norm(x, residual, weight, None, eps, weight_offset, is_rms=True, post_weight=post_weight)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """``(x − mean) / sqrt(variance + eps) · weight + bias``, in float32.

    Args:
        x: ``[..., hidden_size]``, contiguous.
        weight: ``[hidden_size]``.
        bias: ``[hidden_size]`` or None.
        eps: Added to the variance.

    Returns:
        Shaped like ``x``.
    """
    return _norm(x, None, weight, bias, eps, 0.0, is_rms=False)[0]


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """``layer_norm`` of ``x + residual``, and the sum itself, rounded to the dtype of ``x`` before the norm."""
    return _norm(x, residual, weight, bias, eps, 0.0, is_rms=False)


def _norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    weight_offset: float,
    *,
    is_rms: bool,
    post_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    hidden_size = x.shape[-1]
    x = x.contiguous()
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    num_rows = x.numel() // hidden_size if hidden_size else 0
    if not num_rows:
        return out, total
    block = power_of_two(hidden_size)
    _norm_kernel[(num_rows,)](
        out,
        total,
        x,
        x if residual is None else residual.contiguous(),
        weight,
        weight if bias is None else bias,
        weight if post_weight is None else post_weight,
        eps,
        weight_offset,
        HIDDEN_SIZE=hidden_size,
        BLOCK=block,
        IS_RMS=is_rms,
        HAS_RESIDUAL=residual is not None,
        HAS_BIAS=bias is not None,
        HAS_POST=post_weight is not None,
        HAS_OFFSET=weight_offset != 0.0,
        num_warps=max(1, min(16, block // 512)),
        **LAUNCH_OPTIONS,
    )
    return out, total


@triton.jit
def _scaled(x, weight, eps, weight_offset, HIDDEN_SIZE: tl.constexpr, HAS_OFFSET: tl.constexpr, dtype: tl.constexpr):
    """RMSNorm of a row in float32; ``x`` is the whole row."""
    scaled = x * tl.rsqrt(tl.sum(x * x, 0) / HIDDEN_SIZE + eps)
    if HAS_OFFSET:
        weight = weight.to(tl.float32) + weight_offset
    else:
        scaled = scaled.to(dtype)
    return (weight * scaled).to(tl.float32)


@triton.jit
def _norm_kernel(
    out_ptr,
    total_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    post_weight_ptr,
    eps,
    weight_offset,
    HIDDEN_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_RMS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_POST: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * HIDDEN_SIZE
    feature = tl.arange(0, BLOCK)
    is_feature = feature < HIDDEN_SIZE
    x = tl.load(x_ptr + start + feature, mask=is_feature, other=0.0)
    dtype = x.dtype
    if HAS_POST:
        post_weight = tl.load(post_weight_ptr + feature, mask=is_feature, other=0.0)
        x = _scaled(x.to(tl.float32), post_weight, eps, weight_offset, HIDDEN_SIZE, HAS_OFFSET, dtype).to(dtype)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + start + feature, mask=is_feature, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(total_ptr + start + feature, x, mask=is_feature)
    x = x.to(tl.float32)
    weight = tl.load(weight_ptr + feature, mask=is_feature, other=0.0)
    if IS_RMS:
        out = _scaled(x, weight, eps, weight_offset, HIDDEN_SIZE, HAS_OFFSET, dtype)
    else:
        mean = tl.sum(x, 0) / HIDDEN_SIZE
        centred = tl.where(is_feature, x - mean, 0.0)
        scaled = centred * tl.rsqrt(tl.sum(centred * centred, 0) / HIDDEN_SIZE + eps)
        out = scaled * weight.to(tl.float32)
        if HAS_BIAS:
            out += tl.load(bias_ptr + feature, mask=is_feature, other=0.0).to(tl.float32)
    tl.store(out_ptr + start + feature, out.to(out_ptr.dtype.element_ty), mask=is_feature)
