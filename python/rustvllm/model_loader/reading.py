"""Reads stored tensors into memory that is there already.

A tensor of the right type and layout is read straight into its parameter. Any other goes through one small buffer, a
few rows at a time, and is converted on the way: blocks are unpacked, rows that lie in turns are put in order. Files are
read and not mapped: mapped pages would count as this process's memory on top of the weights, and a mapped file that
becomes shorter ends the process.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from rustvllm import _core
from rustvllm.byte_progress import ByteProgress
from rustvllm.exceptions import ModelLoadError
from rustvllm.layers.cpu.narrow import NARROW_DTYPES
from rustvllm.layers.whole_rows import FileRows
from rustvllm.model_loader.checkpoint import BLOCK_TYPES, FLOAT_DTYPES, QUANTIZED_DTYPES, StoredTensor

BUFFER_BYTES = 16 << 20
"""Of the buffer; a single row that is longer gets a longer one."""
NEAR_ROWS = 4
"""Rows that lie at most so many of their lengths apart are read with what lies between them."""


@dataclass(frozen=True, slots=True)
class StoredChange:
    """What a stored tensor becomes before anything else is done with it, in the type that it is stored in.

    Attributes:
        stored: All of it.
        change: Called with it in float32, in the model's shape, which is written.
    """

    stored: StoredTensor
    change: Callable[[Tensor], None]

    def apply(self, raw: Tensor) -> Tensor:
        """The bytes of the changed tensor, from those of the stored one.

        Raises:
            ModelLoadError: It has a number that the stored type does not.
        """
        stored, dtype = self.stored, FLOAT_DTYPES[self.stored.dtype]
        numbers = raw.view(dtype).view(stored.file_shape)
        wide = (numbers.t() if stored.is_turned else numbers).to(torch.float32, copy=True).contiguous()
        self.change(wide)
        numbers.copy_(wide.t() if stored.is_turned else wide)
        if not bool(torch.isfinite(numbers).all()):
            raise ModelLoadError(
                f"{stored.file}: after merging, tensor {stored.name!r} has a value that is not finite in its stored "
                f"type, {stored.dtype}"
            )
        return raw


def unreadable(stored: StoredTensor, error: OSError) -> ModelLoadError:
    """What to say of a tensor that cannot be read; an error without a number is the end of the file."""
    if error.errno is not None:
        return ModelLoadError(f"{stored.file}: tensor {stored.name!r} cannot be read: {error.strerror}")
    return ModelLoadError(
        f"{stored.file}: ended within tensor {stored.name!r}: the file shrank while it was read; download it again"
    )


class TensorReader:
    """Keeps one file open at a time. Leaving it as a context manager closes that.

    Args:
        progress: Called with numbers of bytes, as they are read.
        buffer_bytes: See ``BUFFER_BYTES``; tests make it small.
        changes: Tensors that are read otherwise than the files have them, by their stored names.
    """

    def __init__(
        self,
        progress: ByteProgress,
        buffer_bytes: int = BUFFER_BYTES,
        changes: Mapping[str, StoredChange] = MappingProxyType({}),
    ) -> None:
        self._progress = progress
        self._buffer_bytes = buffer_bytes
        self._changes = changes
        self._changed: tuple[str, Tensor] = ("", torch.empty(0, dtype=torch.uint8, device="cpu"))
        self._buffer: Tensor | None = None
        self._file: Path | None = None
        self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def read_into(self, stored: StoredTensor, target: Tensor) -> None:
        """Fill a tensor.

        Args:
            stored: Of a floating-point type, or in blocks.
            target: Of the same shape; of any type, on any device, in any layout.

        Raises:
            ModelLoadError: The file cannot be read, or has become shorter.
        """
        if stored.is_turned:
            target = target.t()
        is_changed = stored.is_turned or stored.interleaved_rows > 0 or stored.added != 0.0 or stored.row_stride > 0
        is_plain = not is_changed and target.device.type == "cpu" and target.is_contiguous()
        if is_plain and target.dtype == FLOAT_DTYPES.get(stored.dtype):
            # Strided anew: a tensor of one number may have any stride.
            flat = target.detach().as_strided((target.numel(),), (1,))
            self._read(stored, stored.offset, flat.view(torch.uint8))
            return
        for begin, rows in self.blocks(stored, target.device):
            self.unpack_into(stored, begin, rows, target)

    def read_whole(self, stored: StoredTensor) -> Tensor:
        """A tensor of its own, of the stored type and shape.

        Args:
            stored: Of a floating-point type, or one of ``QUANTIZED_DTYPES``.

        Raises:
            ModelLoadError: As ``read_into``.
        """
        raw = torch.empty(stored.nbytes, dtype=torch.uint8, device="cpu")
        self._read_rows(stored, 0, stored.file_shape[0] if stored.row_stride else 1, raw)
        return raw.view((FLOAT_DTYPES | QUANTIZED_DTYPES)[stored.dtype]).view(stored.shape)

    def equals(self, stored: StoredTensor, other: Tensor) -> bool:
        """Whether a stored tensor, converted to another's type, has the other's values.

        Raises:
            ModelLoadError: As ``read_into``.
        """
        if stored.is_turned:
            other = other.t()
        for begin, rows in self.blocks(stored, other.device):
            piece = other if other.dim() == 0 else other[begin : begin + rows.shape[0]]
            numbers = self._numbers(stored, rows)
            if not torch.equal(numbers.to(other.device).to(other.dtype).view(piece.shape), piece):
                return False
        return True

    def unpack_into(self, stored: StoredTensor, begin: int, rows: Tensor, target: Tensor) -> None:
        """Fill a part of a tensor from rows that were read.

        Args:
            stored: What they are of.
            begin: The first one's place.
            rows: As ``blocks`` gives them.
            target: Of the file's shape.
        """
        piece = target if target.dim() == 0 else target[begin : begin + rows.shape[0]]
        # Moved first: a copy to another device and type at once would be converted here.
        piece.copy_(self._numbers(stored, rows).to(target.device).view(piece.shape))

    def blocks(self, stored: StoredTensor, device: torch.device) -> Iterator[tuple[int, Tensor]]:
        """Rows of a stored tensor as they are written down, in their right order, one piece after another.

        Args:
            stored: Of the file's shape.
            device: That they are for.

        Returns:
            The first row, and uint8 ``[rows, bytes of a row]``, which the next piece may overwrite.
        """
        num_rows = stored.file_shape[0] if stored.shape else 1
        row_bytes = stored.nbytes // num_rows if num_rows else 0
        if row_bytes == 0:
            return
        # What lies apart is read with all that lies between, once.
        together = stored.interleaved_rows or (num_rows if stored.item_stride else 1)
        # Blocks take more memory unpacked than packed, and both exist at the same time.
        widest = max(row_bytes, 4 * math.prod(stored.file_shape[1:])) if stored.dtype in BLOCK_TYPES else row_bytes
        per_piece = max(1, self._buffer_bytes // (widest * together)) * together
        needed = min(per_piece, num_rows) * row_bytes
        if self._buffer is None or self._buffer.shape[0] < needed:
            size = max(needed, min(self._buffer_bytes, stored.nbytes))
            self._buffer = None  # not two at once
            self._buffer = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
        for begin in range(0, num_rows, per_piece):
            count = min(per_piece, num_rows - begin)
            raw = self._buffer[: count * row_bytes]
            self._read_rows(stored, begin, count, raw)
            rows = raw.view(count, row_bytes)
            if stored.interleaved_rows:
                turns = rows.view(-1, together // 2, 2, row_bytes)
                rows = turns.transpose(1, 2).reshape(count, row_bytes)
            yield begin, rows

    def rows_in_file(self, stored: StoredTensor) -> FileRows | None:
        """Where the rows of a tensor in blocks or 16 bits lie, for who reads them himself; None: not as they are."""
        num_rows = stored.file_shape[0] if stored.shape else 0
        row_bytes = stored.nbytes // num_rows if num_rows else 0
        is_as_stored = stored.row_stride in (0, row_bytes) and stored.name not in self._changes and not stored.added
        is_read_so = stored.dtype in BLOCK_TYPES or stored.dtype in NARROW_DTYPES
        if not is_read_so or not is_as_stored or row_bytes == 0:
            return None
        return FileRows(stored.file, stored.offset, row_bytes, stored.dtype, stored.interleaved_rows)

    @staticmethod
    def _numbers(stored: StoredTensor, rows: Tensor) -> Tensor:
        """The numbers of rows: ``[rows, …]`` as in the file."""
        rest = stored.file_shape[1:]
        if stored.dtype in FLOAT_DTYPES:
            numbers = rows.view(FLOAT_DTYPES[stored.dtype]).view(rows.shape[0], *rest)
        else:
            numbers = torch.empty(rows.shape[0], *rest, dtype=torch.float32, device="cpu")
            _core.unpack_blocks(stored.dtype, rows.view(-1).numpy(), numbers.view(-1).numpy())
        return numbers - stored.added if stored.added else numbers

    def _read_rows(self, stored: StoredTensor, begin: int, count: int, raw: Tensor) -> None:
        """Fill bytes from some rows: at once, or one by one where only some columns of them are meant."""
        row_bytes = raw.shape[0] // count
        if not stored.item_stride and stored.row_stride in (0, row_bytes):
            self._read(stored, stored.offset + begin * row_bytes, raw)
            return
        if stored.item_stride or stored.row_stride <= NEAR_ROWS * row_bytes:
            dtype = FLOAT_DTYPES[stored.dtype] if stored.item_stride else torch.uint8
            shape = count, row_bytes // dtype.itemsize
            strides = stored.row_stride // dtype.itemsize, (stored.item_stride or 1) // dtype.itemsize or 1
            length = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
            span = torch.empty(length, dtype=dtype, device="cpu")
            self._read(stored, stored.offset + begin * stored.row_stride, span.view(torch.uint8), counts=False)
            # By numpy, in one thread: torch's would wait for each other on a busy machine.
            unit = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
            lying = span.view(unit).as_strided(shape, strides)
            np.copyto(raw.view(unit).view(shape).numpy(), lying.numpy())
            self._progress.advance(raw.shape[0])
            return
        for row, place in enumerate(raw.view(count, row_bytes), start=begin):
            self._read(stored, stored.offset + row * stored.row_stride, place)

    def _read(self, stored: StoredTensor, offset: int, raw: Tensor, *, counts: bool = True) -> None:
        """Fill bytes from a place in a file, or in what a changed tensor would be there."""
        change = self._changes.get(stored.name)
        if change is None:
            self._read_file(stored, offset, raw, counts=counts)
            return
        if self._changed[0] != stored.name:
            self._changed = ("", self._changed[1][:0])  # not two at once
            whole = torch.empty(change.stored.nbytes, dtype=torch.uint8, device="cpu")
            self._read_file(change.stored, change.stored.offset, whole)
            self._changed = (stored.name, change.apply(whole))
        begin = offset - change.stored.offset
        raw.copy_(self._changed[1][begin : begin + raw.shape[0]])

    def _read_file(self, stored: StoredTensor, offset: int, raw: Tensor, *, counts: bool = True) -> None:
        """Fill bytes from a place in a file; ``counts``: they are all the tensor's, so the progress moves by them."""
        descriptor = self._open(stored.file)
        array: Any = raw.numpy()
        memory = memoryview(array)
        done, size = 0, len(memory)
        while done < size:
            # In pieces, so that the progress moves within a tensor of many gigabytes.
            piece = memory[done : done + BUFFER_BYTES]
            try:
                got = os.preadv(descriptor, [piece], offset + done)
            except OSError as error:
                raise ModelLoadError(
                    f"{stored.file}: tensor {stored.name!r} cannot be read: {error.strerror}"
                ) from error
            if got == 0:
                raise ModelLoadError(
                    f"{stored.file}: ended within tensor {stored.name!r}, {size - done} bytes early: the file shrank "
                    "while it was read; download it again"
                )
            done += got
            if counts:
                self._progress.advance(got)

    def _open(self, file: Path) -> int:
        if file != self._file:
            self._close()
            try:
                self._descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise ModelLoadError(f"{file}: cannot be opened: {error.strerror}") from error
            self._file = file
        return self._descriptor

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._descriptor)
            self._file, self._descriptor = None, -1
