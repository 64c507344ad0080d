"""Brings a checkpoint's tensors and a model's together: by name, shape and type, and then by value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor, nn

from rustvllm.byte_progress import ByteProgress
from rustvllm.config.checkpoint.gguf_file import GgufFile, is_gguf
from rustvllm.config.checkpoint.whole_forms import NumberForm
from rustvllm.exceptions import ModelLoadError
from rustvllm.layers.linear import LinearKernel
from rustvllm.layers.whole_rows import LayerPlace, StoredWords, WholeForm
from rustvllm.logger import init_logger
from rustvllm.model_loader.checkpoint import BLOCK_TYPES, FLOAT_DTYPES, MAX_NAMED, StoredTensor
from rustvllm.model_loader.file_packing import FileBatch, FilesPacker
from rustvllm.model_loader.gguf_tensors import file_name
from rustvllm.model_loader.quantized_numbers import dense_rows, has_words, stored_words, whole_rows
from rustvllm.model_loader.quantized_tensors import QuantizedTensor, ZeroBias
from rustvllm.model_loader.reading import StoredChange, TensorReader
from rustvllm.model_loader.slicing import Slices, check_cuts, clear_missing, cut_pieces, missing_rows, slices_of
from rustvllm.models.interface import CausalLM

logger = init_logger(__name__)

HEAD_NAME = "lm_head.weight"


@dataclass(frozen=True)
class Match:
    """A checkpoint's tensors and a model's, brought together by name.

    Attributes:
        sources: What fills each tensor, by its name in the model.
        targets: The model's tensors by the same names.
        slices: Of those that are parts of stored ones: which.
        doubles: Names of tied tensors that are stored as well as what they are tied to, with what is stored and the
            name of the tensor that they are tied to.
    """

    sources: dict[str, StoredTensor]
    targets: dict[str, Tensor]
    slices: dict[str, Slices]
    doubles: list[tuple[str, StoredTensor, str]]


class BlockPacker(Protocol):
    """Takes rows of a tensor as they are written down, for a layer that computes from them."""

    def pack_blocks(self, target: Tensor, first_row: int, type_name: str, rows: Tensor) -> None:
        """Take rows of a tensor in blocks."""
        ...

    def table_rows(self, target: Tensor, type_name: str, row_bytes: int) -> Tensor | None:
        """Where blocks of an embedding that is only looked up go as they are; None: the tensor is not such."""
        ...

    def layer_rows(self, target: Tensor) -> LayerPlace | None:
        """The packed layer that rows of a tensor go to from where they lie in a file, and the first one's place there.

        None: they are not taken so.
        """
        ...


class WholePacker(BlockPacker, Protocol):
    """Also takes a quantised tensor as integers and scales."""

    def pack_whole(self, target: Tensor, first_row: int, numbers: Tensor, scales: Tensor, zeros: Tensor | None) -> None:
        """Take rows of a tensor as numbers, scales and zero points."""
        ...

    def takes_words(self, target: Tensor, form: NumberForm) -> bool:
        """Whether the words that hold a tensor's numbers are taken as they are."""
        ...

    def pack_words(self, target: Tensor, words: StoredWords) -> None:
        """Take all of a tensor as the words that it is stored in."""
        ...


class LayerPacker(FilesPacker, Protocol):
    """Gives dense layers their kernels while a model is loaded.

    Attributes:
        leaves_weights_out: A model's dense layers are built as shapes, and ``make_room`` gives memory to those that
            need it.
        packs_rows: Whether there are layers that are given as they are stored.
        num_whole_layers: How many are given as whole numbers, the head included.
        described_whole_layers: In how many bits and which groups.
    """

    @property
    def leaves_weights_out(self) -> bool: ...
    @property
    def packs_rows(self) -> bool: ...
    @property
    def num_whole_layers(self) -> int: ...
    @property
    def described_whole_layers(self) -> str: ...

    def resident_bytes(self, plain_bytes: int) -> int:
        """What a model takes at least that takes so much as it is."""
        ...

    def plan(
        self,
        model: nn.Module,
        embedding: Tensor | None,
        forms: Sequence[tuple[Tensor, WholeForm | None]],
        narrow: Sequence[tuple[Tensor, torch.dtype]] = (),
    ) -> None:
        """Choose the layers that are kept as they are stored."""
        ...

    def block_packer_of(self, target: Tensor) -> BlockPacker | None:
        """What takes a tensor's rows as they are stored; None: its values are wanted."""
        ...

    def whole_packer_of(self, target: Tensor) -> WholePacker | None:
        """What takes a quantised tensor as integers and scales; None: its values are wanted."""
        ...

    def make_room(self, model: nn.Module) -> None:
        """Give parameters that are shapes alone their memory, but for weights that are kept as they are stored."""
        ...

    def watch(self, model: nn.Module, embedding: Tensor | None) -> None:
        """Note what must be filled before each layer can be packed."""
        ...

    def filled(self, target: Tensor) -> None:
        """Hear that a parameter, or a part of one, has its values."""
        ...

    def finish(self, model: nn.Module, embedding: Tensor | None) -> LinearKernel | None:
        """Give every layer its kernel, and return that of a head that is the embedding."""
        ...


def match_tensors(model: CausalLM, folder: Path, stored: dict[str, StoredTensor]) -> Match:
    """Bring the tensors together.

    Args:
        model: With or without memory.
        folder: For messages.
        stored: What was found there.

    Raises:
        ModelLoadError: The tensors are not exactly the model's.
    """
    sources = _without_prefix(model, folder, stored)
    targets = model.checkpoint_tensors()
    if model.lm_head is not None:
        targets[HEAD_NAME] = model.lm_head.weight
    slices = slices_of(model, targets) if model.group.size > 1 else {}
    sources = {name: source for name, source in sources.items() if name in targets or not isinstance(source, ZeroBias)}
    doubles: list[tuple[str, StoredTensor, str]] = []
    for alias, name in model.tied_tensors().items():
        if alias not in sources:
            continue
        source = sources.pop(alias)
        if name in sources and model.stage.is_last:  # the head's own values, which only the last stage needs
            doubles.append((alias, source, name))
        elif name in sources:
            continue
        else:  # tied, and saved under this name only
            sources[name] = source
    shapes = {name: _whole_shape(target, slices.get(name)) for name, target in targets.items()}
    _check(model, folder, sources, shapes)
    for _, source, name in doubles:
        if source.shape != shapes[name]:
            raise ModelLoadError(
                f"{folder}: the weights do not match {_description(folder)}: "
                f"{_misshapen(source, shapes[name], _shown_names(folder))}"
            )
    check_cuts(sources, slices)
    return Match(sources, targets, slices, doubles)


def fill_from_checkpoint(
    model: CausalLM,
    folder: Path,
    stored: dict[str, StoredTensor],
    filled: Callable[[Tensor], None],
    progress: ByteProgress,
    packer: LayerPacker | None = None,
    changes: Mapping[str, Callable[[Tensor], None]] = MappingProxyType({}),
) -> None:
    """Fill a model.

    Args:
        model: Whose parameters have memory.
        folder: For messages.
        stored: What ``read_headers`` found there.
        filled: Called with every tensor of the model that has its values.
        progress: Called with numbers of bytes, as they are read.
        packer: Knows what takes tensors as they are stored.
        changes: By names of the model's tensors, what is called with them in float32, whole, before they are used.

    Raises:
        ModelLoadError: The tensors are not exactly the model's; nothing was read then. Or a file cannot be read.
    """
    match = match_tensors(model, folder, stored)
    sources, targets, doubles = match.sources, match.targets, match.doubles
    tied = {name: targets[name] for _, _, name in doubles}
    progress.begin(
        sum(_num_bytes(source, match.slices.get(name)) for name, source in sources.items())
        + sum(_num_bytes(source, match.slices.get(name)) for _, source, name in doubles)
    )
    for name in changes:
        if sources[name].row_stride or sources[name].item_stride:
            raise ModelLoadError(
                f"{folder}: adapters cannot be merged into {sources[name].name!r}, which is stored together with others"
            )
    stored_changes = {sources[name].name: StoredChange(sources[name], change) for name, change in changes.items()}
    batch = None if packer is None else FileBatch(packer, progress, filled)
    with TensorReader(progress, changes=stored_changes) as reader:
        for name, source in sorted(sources.items(), key=lambda item: (item[1].file, item[1].offset)):
            target, cut = targets.pop(name), match.slices.get(name)
            for piece, place in _pieces(source, target, cut):
                # What is compared below must be there.
                _fill(reader, piece, place, packer, batch, is_compared=name in tied)
                del place
            if cut is not None and packer is not None and (taker := packer.block_packer_of(target)) is not None:
                _pack_missing(source, target, cut, taker)
            if batch is None:
                filled(target)
            else:
                batch.end_target(target)
            del target  # what is packed gives its memory up
        if batch is not None:
            batch.pack()
        for alias, source, name in doubles:
            cut = match.slices.get(name)
            if not all(_equals(reader, piece, place) for piece, place in _pieces(source, tied[name], cut)):
                logger.warning(
                    "%s: config.json ties %s to another tensor, but the checkpoint has different values for the two; "
                    "using both",
                    folder,
                    alias,
                )
                for piece, place in _pieces(source, model.untie(alias), cut):
                    _fill(reader, piece, place, None, None, is_compared=False)


def _pieces(source: StoredTensor, target: Tensor, cut: Slices | None) -> Iterator[tuple[StoredTensor, Tensor]]:
    """What is read of a stored tensor, with where it goes."""
    if cut is None:
        yield source, target
        return
    clear_missing(target, cut)
    for piece, begin in cut_pieces(source, cut):
        view = target.t() if source.is_turned else target
        dim = 1 - cut.dim if source.is_turned else cut.dim
        yield piece, view.narrow(dim, begin, piece.shape[dim])


def _pack_missing(source: StoredTensor, target: Tensor, cut: Slices, packer: BlockPacker) -> None:
    """Give a packed layer zeros for the rows that no rank has, because they lie beyond the vocabulary."""
    for begin, count in missing_rows(cut):
        row_bytes = source.nbytes // source.file_shape[0]
        packer.pack_blocks(target, begin, source.dtype, torch.zeros((count, row_bytes), dtype=torch.uint8))


def _num_bytes(source: StoredTensor, cut: Slices | None) -> int:
    """What is read of a stored tensor."""
    return source.nbytes if cut is None else sum(piece.nbytes for piece, _ in cut_pieces(source, cut))


def _whole_shape(target: Tensor, cut: Slices | None) -> tuple[int, ...]:
    """What is stored for a tensor of the model."""
    return tuple(target.shape) if cut is None else cut.whole_shape(tuple(target.shape))


def _fill(
    reader: TensorReader,
    source: StoredTensor,
    target: Tensor,
    packer: LayerPacker | None,
    batch: FileBatch | None,
    *,
    is_compared: bool,
) -> None:
    """Give a tensor to what packs it, now or in a batch, and fill it where nothing does or it is looked at again."""
    if isinstance(source, QuantizedTensor):
        whole_packer = None if packer is None else packer.whole_packer_of(target)
        _fill_quantized(reader, source, target, whole_packer, is_compared=is_compared)
        return
    taker = None if packer is None else packer.block_packer_of(target)
    if taker is None:
        reader.read_into(source, target)
    elif is_compared or batch is None or not _pack_later(reader, source, target, taker, batch):
        _pack(reader, source, target, taker, is_compared=is_compared)


def _fill_quantized(
    reader: TensorReader, source: QuantizedTensor, target: Tensor, packer: WholePacker | None, *, is_compared: bool
) -> None:
    turned = target.t() if source.is_turned else target
    if packer is not None and has_words(source) and packer.takes_words(turned, source.form):
        packer.pack_words(turned, stored_words(reader, source))
        if not is_compared:
            return
    elif packer is not None:
        for begin, numbers, scales, zeros in whole_rows(reader, source):
            packer.pack_whole(turned, begin, numbers, scales, zeros)
        if not is_compared:
            return
    for begin, rows in dense_rows(reader, source):
        turned[begin : begin + rows.shape[0]].copy_(rows)


def _equals(reader: TensorReader, source: StoredTensor, other: Tensor) -> bool:
    if not isinstance(source, QuantizedTensor):
        return reader.equals(source, other)
    turned = other.t() if source.is_turned else other
    return all(
        bool((rows.to(other.device).to(other.dtype) == turned[begin : begin + rows.shape[0]]).all())
        for begin, rows in dense_rows(reader, source)
    )


def _pack_later(
    reader: TensorReader, source: StoredTensor, target: Tensor, packer: BlockPacker, batch: FileBatch
) -> bool:
    """Have a tensor packed from where it lies in its file; False: it cannot be."""
    rows = reader.rows_in_file(source)
    if rows is None:
        return False
    if rows.interleaved_rows == 0:
        table = packer.table_rows(target, source.dtype, rows.row_bytes)
        if table is not None:
            batch.add_table(source, table, rows)
            return True
    place = packer.layer_rows(target.t() if source.is_turned else target)
    if place is not None:
        batch.add_rows(source, place, rows)
    return place is not None


def _pack(
    reader: TensorReader, source: StoredTensor, target: Tensor, packer: BlockPacker, *, is_compared: bool
) -> None:
    turned = target.t() if source.is_turned else target
    for begin, rows in reader.blocks(source, target.device):
        packer.pack_blocks(turned, begin, source.dtype, rows)
        if is_compared:
            reader.unpack_into(source, begin, rows, turned)


def _without_prefix(model: CausalLM, folder: Path, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    sources: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        if (bare := _bare_name(model, name)) is None:
            continue
        if bare in sources:
            raise ModelLoadError(f"{folder}: tensors {name!r} and {sources[bare].name!r} are the same tensor")
        sources[bare] = tensor
    return sources


def _bare_name(model: CausalLM, name: str) -> str | None:
    """The name, as the model has it, of what a checkpoint calls ``name``; None: the model does not need it."""
    renamed = model.checkpoint_name(name)
    bare = next((renamed.removeprefix(prefix) for prefix in model.prefixes if renamed.startswith(prefix)), renamed)
    if bare in (HEAD_NAME, model.head_name):
        return HEAD_NAME if model.has_head else None
    return None if model.is_ignored(bare) else bare


def stored_of_stage(model: CausalLM, whole: CausalLM, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """What a stage looks at of a checkpoint: all but what other stages have.

    Args:
        model: Of the stage.
        whole: Of all stages, without memory.
        stored: What was found.
    """
    elsewhere = _names_of(whole) - _names_of(model)
    return {name: tensor for name, tensor in stored.items() if _bare_name(whole, name) not in elsewhere}


def _names_of(model: CausalLM) -> set[str]:
    """Names that a checkpoint may have for the model's tensors."""
    head = set() if model.lm_head is None else {HEAD_NAME}
    return model.checkpoint_tensors().keys() | model.tied_tensors().keys() | head


def _check(model: CausalLM, folder: Path, sources: dict[str, StoredTensor], shapes: dict[str, tuple[int, ...]]) -> None:
    """Refuse a checkpoint whose tensors are not exactly the model's.

    Raises:
        ModelLoadError: Tensors are missing, unexpected, of another shape or of no floating-point dtype.
    """
    shown = _shown_names(folder)
    problems = [
        _misshapen(tensor, shapes[name], shown)
        for name, tensor in sources.items()
        if name in shapes and tensor.shape != shapes[name]
    ]
    problems += [
        f"{tensor.file.name}: tensor {shown(tensor.name)!r} has dtype {tensor.dtype}, supported: "
        f"{', '.join(FLOAT_DTYPES)}"
        for name, tensor in sources.items()
        if name in shapes
        and tensor.dtype not in (*FLOAT_DTYPES, *BLOCK_TYPES)
        and not isinstance(tensor, QuantizedTensor)
    ]
    problems += [f"tensor {shown(name)!r} is missing" for name in shapes if name not in sources]
    problems += [
        f"{tensor.file.name}: tensor {shown(tensor.name)!r} is unexpected"
        for name, tensor in sources.items()
        if name not in shapes
    ]
    if not problems:
        return
    problems = list(dict.fromkeys(problems))  # what a file stores as one tensor may be several of the model's
    more = f"; and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else ""
    raise ModelLoadError(
        f"{folder}: the weights do not match the {type(model).__name__} that {_description(folder)} describes: "
        f"{'; '.join(problems[:MAX_NAMED])}{more}"
    )


def _description(folder: Path) -> str:
    """What describes the model, for messages."""
    return "its metadata" if is_gguf(folder) else "config.json"


def _shown_names(folder: Path) -> Callable[[str], str]:
    """What gives a tensor the name by which a user finds it in a file, for messages."""
    if not is_gguf(folder):
        return str
    return partial(file_name, architecture=GgufFile(folder).architecture)


def _misshapen(stored: StoredTensor, expected: tuple[int, ...], shown: Callable[[str], str]) -> str:
    return (
        f"{stored.file.name}: tensor {shown(stored.name)!r} has shape {list(stored.shape)}, expected {list(expected)}"
    )
