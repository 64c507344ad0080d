"""The numbers of quantised weights: out of their words, less their zero points, a few rows at a time.

A weight is scale · (number − zero point). Differences that are whole numbers of 8 bits go with their scales into packed
layers; everything else becomes the product, each rounded once to 32 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rustvllm.model_loader.quantized_tensors import QuantizedTensor
from rustvllm.model_loader.reading import BUFFER_BYTES, TensorReader

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of a word that each of eight neighbouring outputs has: the word counts 0 2 4 6 1 3 5 7."""
_ROW_UNIT = 8
"""Rows come in multiples of what shares a word."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a weight.

    Attributes:
        begin: The first.
        numbers: int16 ``[rows, in_features]`` less their zero points, or float32 for FP8.
        scales: float32 ``[rows, groups]``; for FP8 in blocks ``[rows, in_features]``.
    """

    begin: int
    numbers: Tensor
    scales: Tensor


def whole_rows(reader: TensorReader, stored: QuantizedTensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Rows as packed layers take them.

    Returns:
        The first row, int8 ``[rows, in_features]`` in the order ``stored.input_order``, float32 ``[rows, groups]``.
    """
    order = stored.input_order
    for rows in _rows(reader, stored):
        numbers = rows.numbers.to(torch.int8)
        yield rows.begin, numbers if order is None else numbers[:, order], rows.scales


def dense_rows(reader: TensorReader, stored: QuantizedTensor) -> Iterator[tuple[int, Tensor]]:
    """Rows as floating-point numbers.

    Returns:
        The first row, float32 ``[rows, in_features]``.
    """
    groups = stored.group_of_input
    for rows in _rows(reader, stored):
        numbers = rows.numbers.to(torch.float32)
        if stored.layout == "fp8":
            scales = rows.scales
        elif groups is not None:
            scales = rows.scales[:, groups]
        else:
            scales = rows.scales.repeat_interleave(stored.group_size, dim=1)
        yield rows.begin, numbers.mul_(scales)


def _rows(reader: TensorReader, stored: QuantizedTensor) -> Iterator[Rows]:
    out_features, in_features = stored.file_shape
    scales = _scales(reader, stored, out_features)
    zeros = _zeros(reader, stored, out_features)
    numbers = reader.read_whole(stored.parts["numbers"])
    per_piece = max(BUFFER_BYTES // (8 * in_features) // _ROW_UNIT, 1) * _ROW_UNIT
    for begin in range(0, out_features, per_piece):
        end = min(begin + per_piece, out_features)
        piece = _numbers(numbers, stored, begin, end)
        if zeros is not None:
            # Where groups have an order, that of each input; otherwise neighbours share one.
            if stored.group_of_input is not None:
                piece -= zeros[begin:end, stored.group_of_input]
            else:
                piece.view(end - begin, -1, stored.group_size).sub_(zeros[begin:end, :, None])
        yield Rows(begin, piece, _scales_of_rows(scales, stored, begin, end))


def _numbers(stored_numbers: Tensor, stored: QuantizedTensor, begin: int, end: int) -> Tensor:
    """int16 ``[rows, in_features]``, signed as the format has them; float32 for FP8."""
    in_features = stored.file_shape[1]
    if stored.layout == "fp8":
        return stored_numbers[begin:end].to(torch.float32)
    if stored.layout == "whole":
        return stored_numbers[begin:end].to(torch.int16)
    if stored.layout == "packed":
        words = stored_numbers[begin:end]
        return _unpacked(words, stored.bits)[:, :in_features].contiguous().to(torch.int16) - (1 << (stored.bits - 1))
    if stored.layout == "gptq":  # words of neighbouring inputs, one below the other
        words = stored_numbers[:, begin:end].t().contiguous()
        return _unpacked(words, stored.bits).to(torch.int16)
    words = stored_numbers[:, begin // _ROW_UNIT : -(-end // _ROW_UNIT)].contiguous()
    return _awq_outputs(words).t().to(torch.int16).contiguous()


def _scales_of_rows(scales: Tensor, stored: QuantizedTensor, begin: int, end: int) -> Tensor:
    """Of some rows, as ``Rows`` has them."""
    down, across = stored.block
    if down == 0:
        return scales[begin:end]
    of_rows = scales[torch.arange(begin, end) // down]
    return of_rows.repeat_interleave(across, dim=1)[:, : stored.file_shape[1]]


def _scales(reader: TensorReader, stored: QuantizedTensor, out_features: int) -> Tensor:
    """float32 ``[out_features, groups]``; of blocks as they are stored."""
    scales = reader.read_whole(stored.parts["scales"]).to(torch.float32)
    if stored.layout in ("gptq", "awq"):
        return scales.t().contiguous()
    if stored.block != (0, 0):
        return scales
    if scales.numel() == 1:
        return scales.view(1, 1).expand(out_features, 1).contiguous()
    return scales.view(out_features, -1)


def _zeros(reader: TensorReader, stored: QuantizedTensor, out_features: int) -> Tensor | None:
    """int16 ``[out_features, groups]``."""
    if (part := stored.parts.get("zeros")) is None:
        return None
    zeros = reader.read_whole(part)
    if stored.layout == "awq":
        return _awq_outputs(zeros).t().to(torch.int16).contiguous()
    if stored.layout == "gptq":
        return _unpacked(zeros, stored.bits).t().to(torch.int16).contiguous() + int(stored.is_less_one)
    if zeros.dtype == torch.int32:  # words of neighbouring outputs, one below the other
        unpacked = _unpacked(zeros.t().contiguous(), stored.bits)[:, :out_features]
        return unpacked.t().to(torch.int16).contiguous() - (1 << (stored.bits - 1))
    zeros = zeros.to(torch.int16)
    num_groups = stored.file_shape[1] // stored.group_size
    return zeros.view(1, 1).expand(out_features, num_groups) if zeros.numel() == 1 else zeros.view(out_features, -1)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """The numbers of words, the lowest bits first: int32 ``[rows, words]`` → uint8 ``[rows, words · 32 / bits]``."""
    rows = words.shape[0]
    numbers = words.view(torch.uint8)  # little endian, as safetensors is
    if bits == 8:
        return numbers
    return torch.stack((numbers & 15, numbers >> 4), dim=-1).view(rows, -1)


def _awq_outputs(words: Tensor) -> Tensor:
    """The outputs of AWQ's words in order: int32 ``[inputs, words]`` → uint8 ``[inputs, 8 · words]``."""
    nibbles = _unpacked(words, 4).view(*words.shape, len(_AWQ_PLACES))
    return nibbles[..., list(_AWQ_PLACES)].view(words.shape[0], -1)
