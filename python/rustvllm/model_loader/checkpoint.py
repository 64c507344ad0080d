"""A checkpoint as its files describe it: which tensors lie where. Headers are read, no weight is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rustvllm.config.checkpoint.gguf_file import FLOAT_TYPES, SERVED_TYPES
from rustvllm.config.checkpoint.lfs_pointer import what_to_do
from rustvllm.config.checkpoint.weight_files import weight_files
from rustvllm.exceptions import ModelLoadError

BLOCK_TYPES = tuple(kind for kind in SERVED_TYPES if kind not in FLOAT_TYPES)
"""What else they may be stored as, in GGUF: blocks that are unpacked."""
FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""What weights may be stored as, by the name that safetensors has for it."""
QUANTIZED_DTYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
}
"""What the parts of quantised weights may be stored as besides."""
MAX_NAMED = 8
"""So many problems are spelled out in one message."""
_LENGTH_BYTES = 8
"""A file begins with the length of its header, little endian."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint.

    Attributes:
        file: Where it lies.
        name: As stored, with its prefix.
        shape: likewise.
        dtype: As safetensors or GGUF names it.
        offset: Of its first byte in the file.
        nbytes: That it takes there.
        is_turned: Whether rows and columns have changed places in the file.
        interleaved_rows: Of each so many rows of the file, those of the first half and of the second lie in turns; 0:
            they have their order.
        added: What every number in the file has more than it should.
        row_stride: Bytes from a row to the next one, where only some columns or rows are meant; 0: rows follow each
            other.
        item_stride: Bytes from a number of a row to the next one, where these lie apart, so that ``row_stride`` may be
            less; 0: they follow each other.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int
    is_turned: bool = False
    interleaved_rows: int = 0
    added: float = 0.0
    row_stride: int = 0
    item_stride: int = 0

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Its shape in the file."""
        return tuple(reversed(self.shape)) if self.is_turned else self.shape


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint, by its stored name.

    Raises:
        ModelLoadError: No safetensors, a shard is missing, a file is truncated or no safetensors file, a name is in
            two files.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in weight_files(folder):
        for tensor in _read_header(file):
            if tensor.name in tensors:
                raise ModelLoadError(
                    f"{folder}: tensor {tensor.name!r} is in {tensors[tensor.name].file.name} and in {file.name}"
                )
            tensors[tensor.name] = tensor
    return tensors


def _read_header(file: Path) -> list[StoredTensor]:
    try:
        # Checks lengths, dtypes and shapes against each other and against the file's size.
        with safe_open(file, framework="pt", device="cpu"):
            pass
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            header: Mapping[str, Any] = json.loads(opened.read(length))
        begin = _LENGTH_BYTES + length
        return [_stored_tensor(file, name, about, begin) for name, about in header.items() if name != "__metadata__"]
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(
            f"{file}: not a complete safetensors file ({file.stat().st_size if file.is_file() else 0} bytes): {error}"
            + what_to_do(file, "; it is truncated or damaged, download it again")
        ) from error


def _stored_tensor(file: Path, name: str, about: Mapping[str, Any], begin: int) -> StoredTensor:
    first, last = about["data_offsets"]
    return StoredTensor(file, name, tuple(about["shape"]), about["dtype"], begin + first, last - first)
