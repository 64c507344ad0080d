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
from rustvllm.exceptions import ModelLoadError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
BLOCK_TYPES = tuple(kind for kind in SERVED_TYPES if kind not in FLOAT_TYPES)
"""What else they may be stored as, in GGUF: blocks that are unpacked."""
FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""What weights may be stored as, by the name that safetensors has for it."""
QUANTIZED_DTYPES = {"I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn}
"""What the parts of quantised weights may be stored as besides."""
MAX_INDEX_BYTES = 256 << 20
_MAX_NAME = 255
MAX_NAMED = 8
"""So many problems are spelled out in one message."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
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
        row_stride: Bytes from a row to the next one, where only some columns are meant; 0: rows follow each other.
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
    for file in _checkpoint_files(folder):
        for tensor in _read_header(file):
            if tensor.name in tensors:
                raise ModelLoadError(
                    f"{folder}: tensor {tensor.name!r} is in {tensors[tensor.name].file.name} and in {file.name}"
                )
            tensors[tensor.name] = tensor
    return tensors


def _checkpoint_files(folder: Path) -> list[Path]:
    index, single = folder / INDEX_NAME, folder / SINGLE_NAME
    if index.is_file():
        return _sharded_files(folder, index)
    if single.is_file():
        return [single]
    files = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    if files:
        return files
    if not folder.is_dir():
        raise ModelLoadError(f"{folder}: no such folder")
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ModelLoadError(
            f"{folder}: has {', '.join(pickles[:3])} but no *.safetensors; rustvllm only loads safetensors, because a "
            "pickle can run code. Save the model again with safetensors (transformers: save_pretrained)"
        )
    raise ModelLoadError(
        f"{folder}: no weights: expected {SINGLE_NAME} or {INDEX_NAME} (or --load-format dummy for random weights)"
    )


def _sharded_files(folder: Path, index: Path) -> list[Path]:
    size = index.stat().st_size
    if size > MAX_INDEX_BYTES:
        raise ModelLoadError(f"{index} has {size} bytes; the limit is {MAX_INDEX_BYTES}")
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelLoadError(
            f'{index}: not an index of shards, which is {{"weight_map": {{tensor: file}}}}: {error!r:.300}'
        ) from error
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ModelLoadError(f"{index}: weight_map must name files in the same folder, got {names[:3]}")
    missing = [name for name in names if not _is_file(folder / name)]
    if missing:
        raise ModelLoadError(
            f"{folder}: {len(missing)} of {len(names)} shards named in {INDEX_NAME} are missing: "
            f"{', '.join(name[:_MAX_NAME] for name in missing[:MAX_NAMED])}; download the model again"
        )
    return [folder / name for name in names]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # the name is too long, or a part of the path cannot be read
        return False


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
