"""A dense layer with weights of 4 or 8 bits, converted just before they are multiplied, so that little memory is read.

A weight is scale · (number − zero point), or scale · number − minimum, computed in float32 and rounded to the dtype of
the activations. Few rows leave most of a device idle, so their features are split among programs, and a second launch
adds the sums in a fixed order. 4-bit numbers are stored so that no number has to move to another lane: of 64
neighbouring features the first half are the low bits of 32 bytes, and the second half their high bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from rustvllm.kernels import tuning
from rustvllm.kernels.tuning import LAUNCH_OPTIONS, QuantizedConfig, quantized_config

HALF_BLOCK = 32
"""How many features have their 4-bit numbers in the low, or in the high, halves of neighbouring bytes."""
MIDDLE_4 = 8
"""The value that 4-bit numbers without zero points or minima store for 0."""
MOST_SPLITS = 16
SUM_COLUMNS = 1024
"""How many outputs' sums a program adds."""
UNPACK_ROWS = 16
"""How many outputs a program unpacks."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight ``[out_features, in_features]`` of integers.

    Attributes:
        numbers: With 8 bits int8 ``[out_features, in_features]``; with 4 bits uint8 ``[out_features, bytes]``, from
            ``pack_nibbles``.
        scales: Floating point ``[groups, out_features]``.
        offsets: ``[groups, out_features]``, the uint8 zero point of each group, or its minimum in the dtype of the
            scales; None if there are none: 8-bit numbers are signed, 4-bit numbers store 0 as ``MIDDLE_4``.
        in_features: The number of inputs.
        group_size: How many features share a scale.
    """

    numbers: Tensor
    scales: Tensor
    offsets: Tensor | None
    in_features: int
    group_size: int

    @property
    def out_features(self) -> int:
        """The number of outputs."""
        return self.numbers.shape[0]

    @property
    def bits(self) -> int:
        """Bits of a number."""
        return 4 if self.numbers.dtype == torch.uint8 else 8

    @property
    def zeros(self) -> str:
        """The kind of offsets: ``middle`` (none), ``point`` or ``minimum``."""
        if self.offsets is None:
            return "middle"
        return "point" if self.offsets.dtype == torch.uint8 else "minimum"

    @property
    def nbytes(self) -> int:
        """Bytes of numbers, scales and offsets."""
        return self.numbers.nbytes + self.scales.nbytes + (0 if self.offsets is None else self.offsets.nbytes)


def nibble_bytes(in_features: int) -> int:
    """Bytes of a row of 4-bit numbers."""
    return -(-in_features // (2 * HALF_BLOCK)) * HALF_BLOCK


def pack_nibbles(numbers: Tensor) -> Tensor:
    """Pack numbers from 0 to 15: uint8 ``[rows, in_features]`` → ``[rows, nibble_bytes(in_features)]``."""
    rows, in_features = numbers.shape
    halves = F.pad(numbers, (0, -in_features % (2 * HALF_BLOCK))).view(rows, -1, 2, HALF_BLOCK)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(rows, -1)


def quantized_linear(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    is_invariant: bool = False,
) -> Tensor:
    """``x Wᵀ + b + residual``, with sums in float32.

    Args:
        x: ``[num_rows, in_features]``, contiguous.
        weight: The weight.
        bias: ``[out_features]`` in the dtype of ``x``, or None.
        residual: ``[num_rows, out_features]`` in the dtype of ``x``, or None.
        is_invariant: Whether a row must have the same bits for any other rows; then there is one tile size, and
            nothing is split.

    Returns:
        ``[num_rows, out_features]``.
    """
    (num_rows, in_features), out_features = x.shape, weight.out_features
    out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    is_few = num_rows <= few_rows(x)
    config = quantized_config(x.device, x.element_size(), many=not is_few and not is_invariant)
    features, has_one_group = _features(weight, config)
    num_columns = triton.cdiv(out_features, config.columns)
    num_splits = 1
    if is_few and not is_invariant:
        wanted = 2 * tuning.num_processors(x.device) // num_columns
        num_splits = max(1, min(wanted, in_features // config.split_features, MOST_SPLITS))
    split_features = triton.cdiv(triton.cdiv(in_features, num_splits), features) * features
    num_splits = triton.cdiv(in_features, split_features)
    sums = out
    if num_splits > 1:
        sums = torch.empty((num_splits, num_rows, out_features), dtype=torch.float32, device=x.device)
    _quantized_kernel[(triton.cdiv(num_rows, config.rows), num_columns, num_splits)](
        sums,
        x,
        weight.numbers,
        weight.scales,
        weight.scales if weight.offsets is None else weight.offsets,
        out if bias is None else bias,
        out if residual is None else residual.contiguous(),
        num_rows,
        out_features,
        in_features,
        weight.numbers.stride(0),
        weight.group_size,
        split_features,
        BITS=weight.bits,
        ZEROS=weight.zeros,
        HAS_ONE_GROUP=has_one_group,
        TILE_ROWS=config.rows,
        TILE_COLUMNS=config.columns,
        TILE_FEATURES=features,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        IS_SPLIT=num_splits > 1,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **LAUNCH_OPTIONS,
    )
    if num_splits > 1:
        _sum_kernel[(num_rows, triton.cdiv(out_features, SUM_COLUMNS))](
            out,
            sums,
            out if bias is None else bias,
            out if residual is None else residual.contiguous(),
            num_rows,
            num_splits,
            out_features,
            BLOCK=SUM_COLUMNS,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            **LAUNCH_OPTIONS,
        )
    return out


def few_rows(x: Tensor) -> int:
    """The most rows for which the tiles for few rows are used."""
    return quantized_config(x.device, x.element_size(), many=False).rows


def unpack(weight: QuantizedWeight, dtype: torch.dtype, num_outputs: int | None = None, first: int = 0) -> Tensor:
    """Convert rows of the weight to floating point.

    Args:
        weight: The weight.
        dtype: The dtype of the result.
        num_outputs: How many rows; None: all.
        first: The first row.

    Returns:
        ``[num_outputs, in_features]``.
    """
    count = weight.out_features - first if num_outputs is None else num_outputs
    device = weight.numbers.device
    out = torch.empty((count, weight.in_features), dtype=dtype, device=device)
    if not count:
        return out
    config = quantized_config(device, out.element_size(), many=False)
    features, has_one_group = _features(weight, config)
    _unpack_kernel[(triton.cdiv(count, UNPACK_ROWS), triton.cdiv(weight.in_features, features))](
        out,
        weight.numbers,
        weight.scales,
        weight.scales if weight.offsets is None else weight.offsets,
        first,
        count,
        weight.out_features,
        weight.in_features,
        weight.numbers.stride(0),
        weight.group_size,
        BITS=weight.bits,
        ZEROS=weight.zeros,
        HAS_ONE_GROUP=has_one_group,
        TILE_COLUMNS=UNPACK_ROWS,
        TILE_FEATURES=features,
        **LAUNCH_OPTIONS,
    )
    return out


def _features(weight: QuantizedWeight, config: QuantizedConfig) -> tuple[int, bool]:
    """How many features are read at once, and whether those of one product share their scales."""
    group = weight.group_size
    at_once = config.features if weight.bits == 4 else config.features // 2  # more would not fit into the registers
    if group >= weight.in_features or group % at_once == 0:
        return at_once, True
    if weight.bits == 4:  # halves of 64, which read a scale for each feature if their groups are small
        return 2 * HALF_BLOCK, group % HALF_BLOCK == 0
    return HALF_BLOCK, group % HALF_BLOCK == 0


@triton.jit
def _widened(
    numbers,
    scale_ptr,
    offset_ptr,
    column,
    is_column,
    feature,
    first,
    in_features,
    out_features,
    group_size,
    BITS: tl.constexpr,
    ZEROS: tl.constexpr,
    HAS_ONE_GROUP: tl.constexpr,
):
    """Weights in float32 ``[features, columns]``; values beyond the last feature are finite."""
    if HAS_ONE_GROUP:
        place = (first // group_size) * out_features + column[None, :]
        is_there = (is_column & (first + 0 * column < in_features))[None, :]
    else:
        place = (feature // group_size)[:, None] * out_features + column[None, :]
        is_there = is_column[None, :] & (feature < in_features)[:, None]
    scale = tl.load(scale_ptr + place, mask=is_there, other=0.0).to(tl.float32)
    value = numbers.to(tl.float32)
    if ZEROS == "minimum":
        return value * scale - tl.load(offset_ptr + place, mask=is_there, other=0.0).to(tl.float32)
    if ZEROS == "point":
        return (value - tl.load(offset_ptr + place, mask=is_there, other=0).to(tl.float32)) * scale
    if BITS == 4:
        value -= 8.0
    return value * scale


@triton.jit(do_not_specialize=["num_rows", "split_features"])
def _quantized_kernel(
    out_ptr,
    x_ptr,
    number_ptr,
    scale_ptr,
    offset_ptr,
    bias_ptr,
    residual_ptr,
    num_rows,
    out_features,
    in_features,
    number_stride,
    group_size,
    split_features,
    BITS: tl.constexpr,
    ZEROS: tl.constexpr,
    HAS_ONE_GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_FEATURES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    is_row = row < num_rows
    is_column = column < out_features
    x_rows = x_ptr + row.to(tl.int64)[:, None] * in_features
    number_rows = number_ptr + column.to(tl.int64)[None, :] * number_stride
    begin = tl.program_id(2) * split_features
    end = tl.minimum(begin + split_features, in_features)
    acc = tl.zeros((TILE_ROWS, TILE_COLUMNS), tl.float32)
    for start in range(begin, end, TILE_FEATURES):
        if BITS == 4:
            place = tl.arange(0, TILE_FEATURES // 2)
            pairs = tl.load(number_rows + (start // 2 + place)[:, None], mask=is_column[None, :], other=0)
            for high in tl.static_range(2):
                first = start + 32 * high
                feature = first + place // 32 * 64 + place % 32
                is_input = is_row[:, None] & (feature < in_features)[None, :]
                x = tl.load(x_rows + feature[None, :], mask=is_input, other=0.0)
                numbers = (pairs >> (4 * high)) & 15
                weight = _widened(
                    numbers, scale_ptr, offset_ptr, column, is_column, feature, first, in_features, out_features,
                    group_size, BITS, ZEROS, HAS_ONE_GROUP,
                )  # fmt: skip
                acc += tl.dot(x, weight.to(dtype), input_precision=PRECISION)
        else:
            feature = start + tl.arange(0, TILE_FEATURES)
            is_feature = feature < in_features
            x = tl.load(x_rows + feature[None, :], mask=is_row[:, None] & is_feature[None, :], other=0.0)
            is_number = is_column[None, :] & is_feature[:, None]
            numbers = tl.load(number_rows + feature[:, None], mask=is_number, other=0)
            weight = _widened(
                numbers, scale_ptr, offset_ptr, column, is_column, feature, start, in_features, out_features,
                group_size, BITS, ZEROS, HAS_ONE_GROUP,
            )  # fmt: skip
            acc += tl.dot(x, weight.to(dtype), input_precision=PRECISION)
    is_output = is_row[:, None] & is_column[None, :]
    place = row.to(tl.int64)[:, None] * out_features + column[None, :]
    if IS_SPLIT:
        out_ptr += tl.program_id(2).to(tl.int64) * num_rows * out_features
    else:
        if HAS_BIAS:
            acc += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if HAS_RESIDUAL:
            acc += tl.load(residual_ptr + place, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=is_output)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _sum_kernel(
    out_ptr,
    sum_ptr,
    bias_ptr,
    residual_ptr,
    num_rows,
    num_splits,
    out_features,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < out_features
    place = tl.program_id(0).to(tl.int64) * out_features + column
    acc = tl.zeros((BLOCK,), tl.float32)
    piece = sum_ptr + place
    for _ in range(num_splits):
        acc += tl.load(piece, mask=is_column, other=0.0)
        piece += num_rows.to(tl.int64) * out_features
    if HAS_BIAS:
        acc += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        acc += tl.load(residual_ptr + place, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=is_column)


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def _unpack_kernel(
    out_ptr,
    number_ptr,
    scale_ptr,
    offset_ptr,
    first_row,
    num_rows,
    out_features,
    in_features,
    number_stride,
    group_size,
    BITS: tl.constexpr,
    ZEROS: tl.constexpr,
    HAS_ONE_GROUP: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_FEATURES: tl.constexpr,
):
    row = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    is_row = row < num_rows
    column = first_row + row
    number_rows = number_ptr + column.to(tl.int64)[None, :] * number_stride
    out_rows = out_ptr + row.to(tl.int64)[None, :] * in_features
    start = tl.program_id(1) * TILE_FEATURES
    if BITS == 4:
        place = tl.arange(0, TILE_FEATURES // 2)
        pairs = tl.load(number_rows + (start // 2 + place)[:, None], mask=is_row[None, :], other=0)
        for high in tl.static_range(2):
            first = start + 32 * high
            feature = first + place // 32 * 64 + place % 32
            weight = _widened(
                (pairs >> (4 * high)) & 15, scale_ptr, offset_ptr, column, is_row, feature, first, in_features,
                out_features, group_size, BITS, ZEROS, HAS_ONE_GROUP,
            )  # fmt: skip
            is_number = is_row[None, :] & (feature < in_features)[:, None]
            tl.store(out_rows + feature[:, None], weight.to(out_ptr.dtype.element_ty), mask=is_number)
    else:
        feature = start + tl.arange(0, TILE_FEATURES)
        is_number = is_row[None, :] & (feature < in_features)[:, None]
        numbers = tl.load(number_rows + feature[:, None], mask=is_number, other=0)
        weight = _widened(
            numbers, scale_ptr, offset_ptr, column, is_row, feature, start, in_features, out_features, group_size,
            BITS, ZEROS, HAS_ONE_GROUP,
        )  # fmt: skip
        tl.store(out_rows + feature[:, None], weight.to(out_ptr.dtype.element_ty), mask=is_number)
