"""What a rank reads of a checkpoint: of each stored tensor the rows or columns that it holds, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from torch import Tensor

from rustvllm.exceptions import ModelLoadError
from rustvllm.layers.parallel import Part, shard_of
from rustvllm.layers.whole_rows import storage_of
from rustvllm.model_loader.checkpoint import BLOCK_TYPES, StoredTensor
from rustvllm.model_loader.quantized_tensors import QuantizedTensor
from rustvllm.models.interface import CausalLM

SMALL_BLOCK, LARGE_BLOCK = 32, 256
"""Numbers of a block of GGUF; the larger is that of the types whose names end in K."""


@dataclass(frozen=True, slots=True)
class Slices:
    """Which part of a stored tensor a tensor of the model is.

    Attributes:
        dim: Of both, as they are stored: 0: rows; 1: columns.
        parts: One after the other.
    """

    dim: int
    parts: tuple[Part, ...]

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The stored tensor's, from the shape of the model's."""
        whole = sum(part.whole for part in self.parts)
        return tuple(whole if dim == self.dim else size for dim, size in enumerate(shape))


def slices_of(model: CausalLM, targets: dict[str, Tensor]) -> dict[str, Slices]:
    """Which tensors of a model are parts of stored ones; those that are stored as they are have no entry.

    Args:
        model: As one rank has it.
        targets: Its tensors, each a whole parameter, whichever way round, or one of the parts of a fused one.
    """
    parameters = {
        storage_of(parameter): (parameter, shard)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if (shard := shard_of(module, name)) is not None
    }
    found: dict[str, Slices] = {}
    for name, target in targets.items():
        parameter, shard = parameters.get(storage_of(target), (None, None))
        if parameter is None or shard is None:
            continue
        if target.numel() == parameter.numel():
            is_turned = target.dim() == 2 and target.stride() != parameter.stride()
            found[name] = Slices(1 - shard.dim if is_turned else shard.dim, shard.parts)
            continue
        width = parameter[0].numel()
        begin, count = int(target.storage_offset()) // width, target.shape[0]
        ends = accumulate(part.count for part in shard.parts)
        own = [
            part
            for part, end in zip(shard.parts, ends, strict=True)
            if begin <= end - part.count and end <= begin + count
        ]
        assert sum(part.count for part in own) == count, f"{name} is cut within a part"
        found[name] = Slices(0, tuple(own))
    return found


def check_cuts(sources: dict[str, StoredTensor], slices: dict[str, Slices]) -> None:
    """Refuse what a rank cannot read a part of, before anything is read.

    Raises:
        ModelLoadError: See ``cut_pieces``.
    """
    for name, cut in slices.items():
        if name in sources:
            for _ in cut_pieces(sources[name], cut):
                pass


def cut_pieces(source: StoredTensor, cut: Slices) -> Iterator[tuple[StoredTensor, int]]:
    """The parts of a stored tensor that a rank has, as the file has them.

    Args:
        source: The whole stored tensor.
        cut: Which part it is.

    Returns:
        Each piece, and where it begins in the rank's tensor.

    Raises:
        ModelLoadError: The tensor is out of a quantised folder of another kind than MXFP4, or its numbers lie in
            groups that would be cut.
    """
    take = _rows if (cut.dim == 1) == source.is_turned else _columns
    if isinstance(source, QuantizedTensor):
        is_padded = any(part.whole % part.count for part in cut.parts)  # on one of the ranks: all refuse it
        if source.layout != "mxfp4" or is_padded:
            raise ModelLoadError(
                f"{source.file.name}: tensor {source.name!r} is quantised ({source.dtype}), and ranks cannot share "
                "such tensors yet: set tensor_parallel_size to 1, or use this model's floating-point weights with "
                "--quantization int8 or int4-g128"
            )
        take = _quantized_rows if cut.dim == 0 else _quantized_columns
    begin = whole_begin = 0
    for part in cut.parts:
        if part.num_stored:
            yield take(source, whole_begin + part.first, part.num_stored), begin
        begin, whole_begin = begin + part.count, whole_begin + part.whole


def missing_rows(cut: Slices) -> Iterator[tuple[int, int]]:
    """Those of a rank's rows or columns that stand for nothing: where they begin, and how many."""
    begin = 0
    for part in cut.parts:
        if part.num_stored < part.count:
            yield begin + part.num_stored, part.count - part.num_stored
        begin += part.count


def clear_missing(target: Tensor, cut: Slices) -> None:
    """Make them zeros."""
    for begin, count in missing_rows(cut):
        target.narrow(cut.dim, begin, count).zero_()


def _rows(source: StoredTensor, first: int, count: int) -> StoredTensor:
    """Some rows, as the file has them."""
    if source.interleaved_rows and (first % source.interleaved_rows or count % source.interleaved_rows):
        raise _uncut(source, f"groups of {source.interleaved_rows} rows")
    num_rows, *rest = source.file_shape
    row_bytes = source.nbytes // num_rows
    offset = source.offset + first * (source.row_stride or row_bytes)
    return replace(source, shape=(count, *rest), offset=offset, nbytes=count * row_bytes, is_turned=False)


def _columns(source: StoredTensor, first: int, count: int) -> StoredTensor:
    """Some columns, as the file has them."""
    num_rows, width = source.file_shape
    row_bytes = source.nbytes // num_rows
    unit = _block(source.dtype)
    if first % unit or count % unit:
        raise _uncut(source, f"{source.dtype} blocks of {unit} inputs")
    unit_bytes = row_bytes * unit // width
    unit_stride = source.item_stride or unit_bytes
    return replace(
        source,
        shape=(num_rows, count),
        offset=source.offset + first // unit * unit_stride,
        nbytes=num_rows * (count // unit) * unit_bytes,
        is_turned=False,
        row_stride=source.row_stride or row_bytes,
    )


def _quantized_rows(source: StoredTensor, first: int, count: int) -> StoredTensor:
    """Some rows of a weight in MXFP4: of its codes, and of its exponents."""
    assert isinstance(source, QuantizedTensor)
    parts = {name: _rows(part, first, count) for name, part in source.parts.items()}
    return _of_parts(source, parts, (count, source.shape[1]))


def _quantized_columns(source: StoredTensor, first: int, count: int) -> StoredTensor:
    """Some columns of a weight in MXFP4, in whole groups."""
    assert isinstance(source, QuantizedTensor)
    size = source.group_size
    if first % size or count % size:
        raise _uncut(source, f"{source.dtype} blocks of {size} inputs")
    parts: dict[str, StoredTensor] = {}
    for name, part in source.parts.items():  # [outputs, groups, ...]
        num_rows, num_groups, *rest = part.shape
        row_bytes = part.nbytes // num_rows
        group_bytes = row_bytes // num_groups
        parts[name] = replace(
            part,
            shape=(num_rows, count // size, *rest),
            offset=part.offset + first // size * group_bytes,
            nbytes=num_rows * (count // size) * group_bytes,
            row_stride=part.row_stride or row_bytes,
        )
    return _of_parts(source, parts, (source.shape[0], count))


def _of_parts(source: QuantizedTensor, parts: dict[str, StoredTensor], shape: tuple[int, int]) -> QuantizedTensor:
    nbytes = sum(part.nbytes for part in parts.values())
    return replace(source, shape=shape, offset=parts["numbers"].offset, nbytes=nbytes, parts=parts)


def _block(dtype: str) -> int:
    """Numbers that are stored together."""
    if dtype not in BLOCK_TYPES:
        return 1
    return LARGE_BLOCK if dtype.endswith("_K") else SMALL_BLOCK


def _uncut(source: StoredTensor, unit: str) -> ModelLoadError:
    return ModelLoadError(
        f"{source.file.name}: tensor {source.name!r} is stored in {unit}, which this tensor_parallel_size would cut "
        "apart: use a smaller one, or other weights of the same model"
    )
