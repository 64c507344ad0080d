"""A dense layer that computes each row independently: fixed tiles, one order of sums, nothing split.

Libraries choose another kernel, and another order of sums, for another number of rows, so the last bits of a request's
logits depend on the batch. Here only the weight determines the tile, one program sums the features in ascending order,
and a row of a tile is computed as if it were the only one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rustvllm.kernels.tuning import LAUNCH_OPTIONS, matmul_config


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x Wᵀ + b``, with sums in float32.

    Args:
        x: ``[..., in_features]``.
        weight: ``[out_features, in_features]``, of the same dtype; the features of a row are contiguous.
        bias: ``[out_features]`` or None.

    Returns:
        ``[..., out_features]``.
    """
    out_features, in_features = weight.shape
    rows = x.reshape(-1, in_features).contiguous()
    num_rows = rows.shape[0]
    out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    if num_rows:
        config = matmul_config(x.device, x.element_size(), out_features)
        grid = (triton.cdiv(num_rows, config.rows), triton.cdiv(out_features, config.columns))
        _linear_kernel[grid](
            out,
            rows,
            weight,
            weight if bias is None else bias,
            num_rows,
            out_features,
            in_features,
            weight.stride(0),
            TILE_ROWS=config.rows,
            TILE_COLUMNS=config.columns,
            TILE_FEATURES=128 // x.element_size(),
            HAS_BIAS=bias is not None,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **LAUNCH_OPTIONS,
        )
    return out.view(*x.shape[:-1], out_features)


# The number of rows must not select the code: Triton would compile one for 1, and one for multiples of 16.
@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    num_rows,
    out_features,
    in_features,
    weight_stride,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_FEATURES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    is_row = row < num_rows
    is_column = column < out_features
    x_rows = x_ptr + row.to(tl.int64)[:, None] * in_features
    weight_rows = weight_ptr + column.to(tl.int64)[None, :] * weight_stride
    acc = tl.zeros((TILE_ROWS, TILE_COLUMNS), tl.float32)
    for start in range(0, in_features, TILE_FEATURES):
        feature = start + tl.arange(0, TILE_FEATURES)
        is_feature = feature < in_features
        x = tl.load(x_rows + feature[None, :], mask=is_row[:, None] & is_feature[None, :], other=0.0)
        weight = tl.load(weight_rows + feature[:, None], mask=is_column[None, :] & is_feature[:, None], other=0.0)
        acc += tl.dot(x, weight, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    place = out_ptr + row.to(tl.int64)[:, None] * out_features + column[None, :]
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
