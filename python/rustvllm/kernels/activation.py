"""Gated activations: the activation of one half of each row, times the other half."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from rustvllm.kernels.tuning import LAUNCH_OPTIONS, power_of_two

MAX_BLOCK = 1024


def silu_and_mul(x: Tensor) -> Tensor:
    """``silu(gate) · up`` of rows ``[gate, up]``.

    Args:
        x: ``[num_tokens, 2 · size]``; the features of a row are contiguous.

    Returns:
        ``[num_tokens, size]``; the activation is rounded to the dtype of ``x`` before the multiplication.
    """
    return _bend_and_mul(x, "silu")


def gelu_and_mul(x: Tensor, *, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """``gelu(gate) · up``; see ``silu_and_mul``."""
    return _bend_and_mul(x, "gelu_tanh" if approximate == "tanh" else "gelu")


def _bend_and_mul(x: Tensor, kind: str) -> Tensor:
    num_tokens, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    block = min(power_of_two(size), MAX_BLOCK)
    _bend_kernel[(num_tokens, triton.cdiv(size, block))](
        out, x, x.stride(0), SIZE=size, BLOCK=block, KIND=kind, num_warps=4, **LAUNCH_OPTIONS
    )
    return out


@triton.jit
def _bend_kernel(out_ptr, x_ptr, stride_token, SIZE: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_feature = feature < SIZE
    gate = tl.load(x_ptr + token * stride_token + feature, mask=is_feature, other=0.0)
    up = tl.load(x_ptr + token * stride_token + SIZE + feature, mask=is_feature, other=0.0)
    dtype = gate.dtype
    gate = gate.to(tl.float32)
    if KIND == "silu":
        share = _sigmoid(gate)
    elif KIND == "gelu_tanh":
        # (1 + tanh(y)) / 2 is the sigmoid of 2 y.
        share = _sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        share = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    tl.store(out_ptr + token * SIZE + feature, (gate * share).to(dtype) * up, mask=is_feature)


@triton.jit
def _sigmoid(x):
    small = tl.exp(-tl.abs(x))  # never overflows
    return tl.where(x < 0, small, 1.0) / (1.0 + small)
