"""The numbers of quantised weights: out of their words, less their zero points, some rows at a time.

A weight is scale · (number − zero point). Differences that are whole numbers of 8 bits go with their scales into packed
layers; everything else becomes the product, rounded to 32 bits. numpy moves the numbers: each operation is one pass of
one thread, so that a busy machine does not slow it down more than its share.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rustvllm.exceptions import ModelLoadError
from rustvllm.layers.whole_rows import StoredWords
from rustvllm.model_loader.quantized_tensors import QuantizedTensor
from rustvllm.model_loader.reading import TensorReader

PIECE_NUMBERS = 1 << 20
"""Numbers that are taken out of their words together: they stay near the processor meanwhile."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbouring outputs each nibble of a word is, from the lowest on."""
_ROW_UNIT = 8
"""Rows come in multiples of what shares a word."""
_MIDDLE_8 = 128
_MXFP4_NUMBERS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice what each code of MXFP4 stands for: whole numbers."""
_MXFP4_SCALES = np.ldexp(np.float32(1), np.arange(256) - 128).astype(np.float32)
"""Half of what each exponent stands for."""

Bytes = npt.NDArray[np.uint8]


def has_words(stored: QuantizedTensor) -> bool:
    """Whether the numbers of a whole tensor can be taken from its words, with one number less or with zero points."""
    if stored.layout == "mxfp4":
        return True
    if stored.layout not in ("awq", "gptq", "packed"):
        return False
    has_one_zero = stored.bits == 8 or stored.has_middle_zeros or stored.parts.get("zeros") is None
    return has_one_zero or stored.form.zeros == "point"


def stored_words(reader: TensorReader, stored: QuantizedTensor) -> StoredWords:
    """The words of a tensor that has them, with its scales and zero points."""
    zeros = _zeros(reader, stored) if stored.form.zeros == "point" else None
    middle = 1 << (stored.bits - 1)  # of 8 bits all zero points are this, or the tensor would not be whole
    is_coded = stored.layout == "mxfp4"
    words = reader.read_whole(stored.parts["numbers"]).contiguous()
    return StoredWords(
        words.flatten(1).view(torch.int32) if is_coded else words,
        cast("Any", stored.layout),
        stored.bits,
        0 if zeros is not None or is_coded else middle,
        _scales(reader, stored).contiguous(),
        None if zeros is None else torch.from_numpy(zeros.astype(np.float32)),
        stored.input_order,
    )


def whole_rows(reader: TensorReader, stored: QuantizedTensor) -> Iterator[tuple[int, Tensor, Tensor, Tensor | None]]:
    """Rows as packed layers take them, of a tensor that is whole.

    Returns:
        The first row, int8 ``[rows, in_features]`` in the order ``stored.input_order``, float32 scales
        ``[rows, groups]``; and, where the form of the tensor has them, zero points of numbers from 0 to 15, float32
        ``[rows, groups]``. Without them they are taken away already.
    """
    has_points = stored.form.zeros == "point"
    zeros, scales = _zeros(reader, stored), _scales(reader, stored)
    order = None if stored.input_order is None else stored.input_order.numpy()
    for begin, numbers in _pieces(reader, stored):
        ordered = numbers if order is None else np.take(numbers, order, axis=1)
        count = ordered.shape[0]
        if stored.layout in ("whole", "mxfp4"):
            differences = ordered.view(np.int8)
        elif stored.bits == 8:  # whole, so that all zero points are 128
            differences = (ordered ^ _MIDDLE_8).view(np.int8)
        else:
            differences = ordered.view(np.int8)
            if zeros is None:
                differences -= 1 << (stored.bits - 1)
            elif not has_points:  # neighbours share one
                groups = differences.reshape(count, -1, stored.group_size)
                groups -= zeros[begin : begin + count, :, None].astype(np.int8)
        points = None
        if has_points and zeros is not None:
            points = torch.from_numpy(zeros[begin : begin + count].astype(np.float32))
        yield begin, torch.from_numpy(differences), scales[begin : begin + count], points


def dense_rows(reader: TensorReader, stored: QuantizedTensor) -> Iterator[tuple[int, Tensor]]:
    """Rows as floating-point numbers.

    Returns:
        The first row, float32 ``[rows, in_features]``.

    Raises:
        ModelLoadError: FP8 that is not finite: a code stands for NaN, or a product with its scale is too large.
    """
    zeros, scales = _zeros(reader, stored), _scales(reader, stored)
    groups = stored.group_of_input
    in_features = stored.file_shape[1]
    if groups is None and stored.layout != "fp8":
        groups = torch.arange(in_features) // stored.group_size
    for begin, numbers in _pieces(reader, stored):
        end = begin + numbers.shape[0]
        if groups is None:
            rows = torch.from_numpy(numbers).view(torch.float8_e4m3fn).to(torch.float32)
            rows.mul_(_float_scales(scales, stored, begin, end))
            _refuse_not_finite(rows, begin, stored)
            yield begin, rows
            continue
        is_signed = stored.layout in ("whole", "mxfp4")
        rows = torch.from_numpy(numbers.view(np.int8) if is_signed else numbers).to(torch.float32)
        if zeros is not None:
            rows -= torch.from_numpy(zeros[begin:end]).to(torch.float32)[:, groups]
        elif not is_signed:
            rows -= 1 << (stored.bits - 1)
        yield begin, rows.mul_(scales[begin:end][:, groups])


def _refuse_not_finite(rows: Tensor, begin: int, stored: QuantizedTensor) -> None:
    """Refuse weights with which every request would fail; the two extremes of rows are not finite if a number is not.

    Args:
        rows: float32 ``[rows, in_features]``.
        begin: The first one's place in the weight.
        stored: What they are of.

    Raises:
        ModelLoadError: Names the tensor and the first number.
    """
    if all(bool(extreme.isfinite()) for extreme in torch.aminmax(rows)):
        return
    row, column = (int(index) for index in (~rows.isfinite()).nonzero()[0])
    numbers = stored.parts["numbers"]
    raise ModelLoadError(
        f"{numbers.file}: the weight {numbers.name!r} with its scale is {rows[row, column]:g} at row {begin + row}, "
        f"column {column}, but must be finite; the file is damaged or was quantised wrongly, download it again"
    )


def _pieces(reader: TensorReader, stored: QuantizedTensor) -> Iterator[tuple[int, Bytes]]:
    """Rows of numbers as they are stored, a byte each: ``[rows, in_features]``, memory that may be written."""
    out_features, in_features = stored.file_shape
    numbers = reader.read_whole(stored.parts["numbers"])
    per_piece = max(PIECE_NUMBERS // in_features // _ROW_UNIT, 1) * _ROW_UNIT
    for begin in range(0, out_features, per_piece):
        end = min(begin + per_piece, out_features)
        if stored.layout in ("whole", "fp8"):
            yield begin, numbers[begin:end].view(torch.uint8).numpy()
        elif stored.layout == "mxfp4":
            yield begin, _MXFP4_NUMBERS[_unpacked(numbers[begin:end].flatten(1), stored.bits)].view(np.uint8)
        elif stored.layout == "packed":
            yield begin, np.ascontiguousarray(_unpacked(numbers[begin:end], stored.bits)[:, :in_features])
        elif stored.layout == "gptq":  # words of neighbouring inputs, one below the other
            yield begin, _unpacked(numbers[:, begin:end].t(), stored.bits)
        else:
            yield begin, _awq_outputs(numbers[:, begin // _ROW_UNIT : end // _ROW_UNIT])


def _unpacked(words: Tensor, bits: int) -> Bytes:
    """The numbers of words, the lowest bits first: int32 ``[rows, words]`` → ``[rows, words · 32 / bits]``."""
    numbers: Bytes = words.contiguous().view(torch.uint8).numpy()  # little endian, as safetensors is
    if bits == 8:
        return numbers
    pairs = numbers.astype(np.uint16)
    pairs |= pairs << 4
    pairs &= 0x0F0F  # each nibble in a byte of its own, the lower one first
    return pairs.view(np.uint8)


def _awq_outputs(words: Tensor) -> Bytes:
    """The outputs of AWQ's words: int32 ``[inputs, words]`` → ``[8 · words, inputs]``."""
    num_inputs, num_words = words.shape
    bytes_of: Bytes = words.contiguous().view(torch.uint8).t().contiguous().numpy()  # [4 · words, inputs]
    parts = bytes_of.reshape(num_words, 4, num_inputs)
    outputs = np.empty((num_words, len(_AWQ_ORDER), num_inputs), np.uint8)
    for index in range(4):
        np.bitwise_and(parts[:, index], 15, out=outputs[:, _AWQ_ORDER[2 * index]])
        np.right_shift(parts[:, index], 4, out=outputs[:, _AWQ_ORDER[2 * index + 1]])
    return outputs.reshape(-1, num_inputs)


def _zeros(reader: TensorReader, stored: QuantizedTensor) -> npt.NDArray[np.int16] | None:
    """``[out_features, groups]``, counted as the numbers are; None: the middle, or 0 of signed numbers."""
    if (part := stored.parts.get("zeros")) is None:
        return None
    out_features, in_features = stored.file_shape
    zeros = reader.read_whole(part)
    if stored.layout == "awq":
        return _awq_outputs(zeros).astype(np.int16)
    if stored.layout == "gptq":
        unpacked = _unpacked(zeros, stored.bits).T.astype(np.int16)
        return np.ascontiguousarray(unpacked) + np.int16(stored.is_less_one)
    if zeros.dtype == torch.int32:  # words of neighbouring outputs, one below the other
        return np.ascontiguousarray(_unpacked(zeros.t(), stored.bits)[:, :out_features].T).astype(np.int16)
    signed: npt.NDArray[Any] = zeros.numpy().astype(np.int16)
    if stored.layout == "packed":
        signed += 1 << (stored.bits - 1)
    shape = (out_features, in_features // stored.group_size)
    one_for_all = signed.size == 1
    return np.full(shape, signed.item(), np.int16) if one_for_all else np.ascontiguousarray(signed.reshape(shape))


def _scales(reader: TensorReader, stored: QuantizedTensor) -> Tensor:
    """float32 ``[out_features, groups]``; of blocks as they are stored."""
    out_features = stored.file_shape[0]
    if stored.layout == "mxfp4":
        return torch.from_numpy(_MXFP4_SCALES[reader.read_whole(stored.parts["scales"]).numpy()])
    scales = reader.read_whole(stored.parts["scales"]).to(torch.float32)
    if stored.layout in ("gptq", "awq"):
        return scales.t().contiguous()
    if stored.block != (0, 0):
        return scales
    if scales.numel() == 1:
        return scales.view(1, 1).expand(out_features, 1).contiguous()
    return scales.view(out_features, -1)


def _float_scales(scales: Tensor, stored: QuantizedTensor, begin: int, end: int) -> Tensor:
    """Of some rows of FP8: ``[rows, 1]``, or ``[rows, in_features]`` of blocks."""
    down, across = stored.block
    if down == 0:
        return scales[begin:end]
    of_rows = scales[torch.arange(begin, end) // down]
    return of_rows.repeat_interleave(across, dim=1)[:, : stored.file_shape[1]]
