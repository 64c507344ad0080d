"""Low-rank products that are added to a dense layer's outputs, for all adapters of a step at once, with any ranks.

There are two launches per layer: down to the ranks, for pieces of the inputs that are then summed in a fixed order, and
up to the outputs. A program computes some rows with the same adapter. A table has the addresses of its matrices, so
adapters need not have the same size or lie in one place. A row's result does not depend on other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from rustvllm.kernels.tuning import LAUNCH_OPTIONS, lora_config

TILE_ROWS = 16
"""The most rows of a step that a program computes: the minimum for matrix instructions."""
TILE_RANKS = 16
LAYER_COLUMNS = 2
"""The table's columns for a layer: the address of its down matrix for all ranks, ``[ranks, inputs]``, and the ranks."""
PART_COLUMNS = 6
"""The table's columns for each part of a layer: addresses of the up matrix, ``[outputs, ranks]``, and of float32 gains
``[outputs]`` (0: none), its ranks and the first of them, its first output and its outputs. A part that the adapter does
not change has no ranks."""


@dataclass(frozen=True, slots=True)
class AdapterTiles:
    """Rows of a step, grouped by adapter.

    Attributes:
        rows: int32 ``[n]``, rows of the step, those of an adapter one after the other.
        tiles: int32 ``[num_tiles, 3]``: the adapter's row of the table, the first index into ``rows``, and how many
            rows, at most ``TILE_ROWS``; a tile without rows is skipped.
    """

    rows: Tensor
    tiles: Tensor


def make_tiles(
    runs: list[tuple[int, npt.NDArray[np.int32]]],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Make ``rows`` and ``tiles`` of ``AdapterTiles``, on the host.

    Args:
        runs: For each adapter, its row of the table, and its rows of the step.
    """
    tiles, first = [], 0
    for slot, rows in runs:
        tiles += [(slot, first + done, min(TILE_ROWS, rows.size - done)) for done in range(0, rows.size, TILE_ROWS)]
        first += rows.size
    return np.concatenate([rows for _, rows in runs]).astype(np.int32), np.array(tiles, np.int32)


def add_adapters(
    x: Tensor,
    out: Tensor,
    bias: Tensor | None,
    tiles: AdapterTiles,
    table: Tensor,
    *,
    num_ranks: int,
    num_outputs: int,
) -> None:
    """Apply the gains of each adapter to its rows of a layer's output, and add ``up (down x)``.

    Args:
        x: ``[num_tokens, in_features]`` with contiguous rows.
        out: ``[num_tokens, out_features]``, changed in place; its dtype is also that of ``x`` and all matrices.
        bias: ``[out_features]``, which ``out`` contains and gains do not scale; None if there is none.
        tiles: The tiles of the step, not empty.
        table: int64 ``[num_adapters, LAYER_COLUMNS + parts * PART_COLUMNS]``, for this layer.
        num_ranks: The most ranks of an adapter in this layer.
        num_outputs: The outputs of the widest part.
    """
    in_features = x.shape[1]
    num_parts = (table.shape[1] - LAYER_COLUMNS) // PART_COLUMNS
    num_rows, num_tiles = tiles.rows.shape[0], tiles.tiles.shape[0]
    config = lora_config(x.device, x.element_size())
    num_splits = triton.cdiv(in_features, config.split_features)
    padded = triton.cdiv(num_ranks, TILE_RANKS) * TILE_RANKS
    ranks = torch.empty((num_splits, num_rows, padded), dtype=torch.float32, device=x.device)
    of_step = (tiles.rows, tiles.tiles, table, table.stride(0), num_rows * padded, padded)
    options = {
        "TILE_ROWS": TILE_ROWS,
        "TILE_RANKS": TILE_RANKS,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        **LAUNCH_OPTIONS,
    }
    _shrink_kernel[(num_tiles, padded // TILE_RANKS, num_splits)](
        ranks,
        x,
        *of_step,
        x.stride(0),
        in_features,
        TILE_FEATURES=config.features,
        SPLIT_FEATURES=config.split_features,
        **options,
    )
    _expand_kernel[(num_tiles, triton.cdiv(num_outputs, config.columns), num_parts)](
        out,
        out if bias is None else bias,
        ranks,
        *of_step,
        num_splits,
        out.stride(0),
        TILE_COLUMNS=config.columns,
        HAS_BIAS=bias is not None,
        FIRST_PART=LAYER_COLUMNS,
        PART_COLUMNS=PART_COLUMNS,
        **options,
    )


@triton.jit
def _rows_of_tile(rows_ptr, tile_ptr, TILE_ROWS: tl.constexpr):
    """The indices of a tile's rows, the rows, and which of them exist."""
    first_place, num_rows = tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
    place = tl.arange(0, TILE_ROWS)
    is_row = place < num_rows
    row = tl.load(rows_ptr + first_place + place, mask=is_row, other=0)
    return first_place + place, row.to(tl.int64), is_row


# Neither a step's numbers nor the alignment of its arrays may select the code, so that no step waits for a compiler.
@triton.jit(
    do_not_specialize=["table_stride", "split_stride", "ranks_stride"],
    do_not_specialize_on_alignment=["rows_ptr", "tile_ptr", "table_ptr"],
)
def _shrink_kernel(
    ranks_ptr,
    x_ptr,
    rows_ptr,
    tile_ptr,
    table_ptr,
    table_stride,
    split_stride,
    ranks_stride,
    x_stride,
    in_features,
    TILE_ROWS: tl.constexpr,
    TILE_RANKS: tl.constexpr,
    TILE_FEATURES: tl.constexpr,
    SPLIT_FEATURES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile_ptr += tl.program_id(0) * 3
    layer_ptr = table_ptr + tl.load(tile_ptr).to(tl.int64) * table_stride
    num_ranks = tl.load(layer_ptr + 1).to(tl.int32)
    first_rank = tl.program_id(1) * TILE_RANKS
    if (first_rank < num_ranks) & (tl.load(tile_ptr + 2) > 0):
        down_ptr = tl.load(layer_ptr).to(tl.pointer_type(x_ptr.dtype.element_ty))
        place, row, is_row = _rows_of_tile(rows_ptr, tile_ptr, TILE_ROWS)
        rank = first_rank + tl.arange(0, TILE_RANKS)
        is_rank = rank < num_ranks
        x_rows = x_ptr + row[:, None] * x_stride
        down_rows = down_ptr + rank.to(tl.int64)[None, :] * in_features
        begin = tl.program_id(2) * SPLIT_FEATURES
        acc = tl.zeros((TILE_ROWS, TILE_RANKS), tl.float32)
        for start in range(0, SPLIT_FEATURES, TILE_FEATURES):
            feature = begin + start + tl.arange(0, TILE_FEATURES)
            is_feature = feature < in_features
            x = tl.load(x_rows + feature[None, :], mask=is_row[:, None] & is_feature[None, :], other=0.0)
            down = tl.load(down_rows + feature[:, None], mask=is_rank[None, :] & is_feature[:, None], other=0.0)
            acc += tl.dot(x, down, input_precision=PRECISION)
        to = ranks_ptr + tl.program_id(2).to(tl.int64) * split_stride
        to += place.to(tl.int64)[:, None] * ranks_stride + rank[None, :]
        tl.store(to, acc, mask=is_row[:, None] & is_rank[None, :])


@triton.jit(
    do_not_specialize=["table_stride", "split_stride", "ranks_stride", "num_splits"],
    do_not_specialize_on_alignment=["rows_ptr", "tile_ptr", "table_ptr"],
)
def _expand_kernel(
    out_ptr,
    bias_ptr,
    ranks_ptr,
    rows_ptr,
    tile_ptr,
    table_ptr,
    table_stride,
    split_stride,
    ranks_stride,
    num_splits,
    out_stride,
    TILE_ROWS: tl.constexpr,
    TILE_RANKS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FIRST_PART: tl.constexpr,
    PART_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile_ptr += tl.program_id(0) * 3
    part_ptr = table_ptr + tl.load(tile_ptr).to(tl.int64) * table_stride
    part_ptr += FIRST_PART + tl.program_id(2) * PART_COLUMNS
    num_ranks = tl.load(part_ptr + 2).to(tl.int32)
    num_outputs = tl.load(part_ptr + 5).to(tl.int32)
    first_column = tl.program_id(1) * TILE_COLUMNS
    if (num_ranks > 0) & (first_column < num_outputs) & (tl.load(tile_ptr + 2) > 0):
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        up_ptr = tl.load(part_ptr).to(tl.pointer_type(dtype))
        gains, first_rank = tl.load(part_ptr + 1), tl.load(part_ptr + 3).to(tl.int32)
        first_output = tl.load(part_ptr + 4).to(tl.int32)
        place, row, is_row = _rows_of_tile(rows_ptr, tile_ptr, TILE_ROWS)
        column = first_column + tl.arange(0, TILE_COLUMNS)
        is_column = column < num_outputs
        from_row = ranks_ptr + place.to(tl.int64)[:, None] * ranks_stride + first_rank
        acc = tl.zeros((TILE_ROWS, TILE_COLUMNS), tl.float32)
        for start in range(0, num_ranks, TILE_RANKS):
            rank = start + tl.arange(0, TILE_RANKS)
            is_rank = rank < num_ranks
            sums = tl.zeros((TILE_ROWS, TILE_RANKS), tl.float32)
            piece = from_row + rank[None, :]
            for _ in range(num_splits):
                sums += tl.load(piece, mask=is_row[:, None] & is_rank[None, :], other=0.0)
                piece += split_stride
            up_columns = up_ptr + column.to(tl.int64)[None, :] * num_ranks + rank[:, None]
            up = tl.load(up_columns, mask=is_column[None, :] & is_rank[:, None], other=0.0)
            acc += tl.dot(sums.to(dtype), up, input_precision=PRECISION)
        is_output = is_row[:, None] & is_column[None, :]
        output = first_output + column
        to = out_ptr + row[:, None] * out_stride + output[None, :]
        own = tl.load(to, mask=is_output, other=0.0).to(tl.float32)
        if gains != 0:
            gain = tl.load(gains.to(tl.pointer_type(tl.float32)) + column, mask=is_column, other=1.0)[None, :]
            if HAS_BIAS:
                bias = tl.load(bias_ptr + output, mask=is_column, other=0.0).to(tl.float32)[None, :]
                own = (own - bias) * gain + bias
            else:
                own *= gain
        tl.store(to, (own + acc).to(dtype), mask=is_output)
