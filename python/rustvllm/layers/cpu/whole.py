"""Dense layers and embeddings whose stored numbers are whole ones with scales: packed as they are, while they are read.

Blocks of GGUF files, and the numbers of AWQ, GPTQ and compressed-tensors, come here by rows, on their way from the
file, so neither is anything rounded a second time nor is the whole weight there as floating-point numbers. A layer that
is stored in parts is taken if all its parts are of this kind and have one order of their inputs, with the smallest of
their groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor, nn

from rustvllm import _core
from rustvllm.config.checkpoint.whole_forms import NumberForm
from rustvllm.exceptions import ModelLoadError
from rustvllm.layers.cpu.embedding import BlockEmbedding, PackedEmbedding
from rustvllm.layers.cpu.linear import CoreLinear, kind_of
from rustvllm.layers.linear import Embedding, Linear
from rustvllm.layers.whole_rows import (
    LayerPlace,
    StoredWords,
    WholeForm,
    common_forms,
    described_forms,
    first_row_of,
    rows_in_form,
    storage_of,
)


class WholeLayers:
    """See the module.

    Args:
        threads: Which the products use.
        model: With or without memory.
        embedding: The model's, if that is the head, too; others are looked up alone, and keep their blocks.
        forms: Every tensor of the model that is stored, with how its numbers have scales; None: they are not whole
            ones.
        round_activations: Whether they meet activations that are rounded to 8 bits, where their groups allow it.
    """

    def __init__(
        self,
        threads: _core.CpuThreads,
        model: nn.Module,
        embedding: Tensor | None,
        forms: Sequence[tuple[Tensor, WholeForm | None]],
        *,
        round_activations: bool,
    ) -> None:
        self._threads = threads
        self._rounds = round_activations
        found = common_forms(forms)
        modules = [module for module in model.modules() if isinstance(module, Linear | Embedding)]
        weights = [module.weight for module in modules]
        self._forms: dict[int, WholeForm] = {}
        self._shapes: dict[int, tuple[int, int]] = {}
        for weight in [*weights, *([] if embedding is None else [embedding])]:
            if (common := found.get(storage_of(weight))) is not None:
                shape = (weight.shape[0], weight.shape[1])
                numbers = common.numbers.as_multiplied(shape[1], round_activations=round_activations)
                self._forms[storage_of(weight)] = replace(common, numbers=numbers)
                self._shapes[storage_of(weight)] = shape
        self._packed: dict[int, _core.PackedLinear] = {}
        looked_up = [module.weight for module in modules if isinstance(module, Embedding)]
        self._only_looked_up = {storage_of(table) for table in looked_up if table is not embedding}
        self._blocks: dict[int, BlockEmbedding] = {}

    def __len__(self) -> int:
        return len(self._forms)

    def form_of(self, weight: Tensor) -> NumberForm | None:
        """How the numbers of a layer are kept; None: it is not one of these."""
        form = self._forms.get(storage_of(weight))
        return None if form is None else form.numbers

    def described(self) -> str:
        """How many layers are kept in which bits and groups."""
        return described_forms(self._forms.values())

    def pack_blocks(self, target: Tensor, first_row: int, type_name: str, rows: Tensor) -> None:
        """Take rows of a layer's weight, or of a part of it.

        Args:
            target: The weight or the part.
            first_row: Of the target.
            type_name: Of the blocks.
            rows: uint8 ``[rows, bytes of a row]``.

        Raises:
            ModelLoadError: A scale is not finite.
        """
        if storage_of(target) in self._only_looked_up:
            table, offset = self._table_of(target, type_name, rows.shape[1])
            table.fill(offset + first_row, rows)
            return
        packed, offset = self._packed_of(target)
        try:
            packed.pack_blocks(offset + first_row, type_name, rows.numpy())
        except ValueError as error:
            raise _unpackable(packed, error) from error

    def table_rows(self, target: Tensor, type_name: str, row_bytes: int) -> Tensor | None:
        """Where the blocks of an embedding that is only looked up, or of a part of one, go; None: it is not such.

        Args:
            target: The embedding or the part.
            type_name: Of the blocks.
            row_bytes: Of a vector's blocks.

        Returns:
            uint8 ``[rows, row_bytes]``, from the part's first row on.
        """
        if storage_of(target) not in self._forms or storage_of(target) not in self._only_looked_up:
            return None
        table, offset = self._table_of(target, type_name, row_bytes)
        return table.rows_from(offset)

    def layer_rows(self, target: Tensor) -> LayerPlace | None:
        """The layer of a weight, or of a part of one, and the first row there; None: it is not one of these."""
        key = storage_of(target)
        return self._packed_of(target) if key in self._forms and key not in self._only_looked_up else None

    def pack_whole(self, target: Tensor, first_row: int, numbers: Tensor, scales: Tensor, zeros: Tensor | None) -> None:
        """Take rows of a layer's weight, or of a part of it, as whole numbers and scales.

        Args:
            target: The weight or the part.
            first_row: Of the target.
            numbers: int8 ``[rows, in_features]``, in the order of the form's inputs.
            scales: float32 ``[rows, groups]`` of the part.
            zeros: float32 ``[rows, groups]``, zero points that the numbers are counted from; None: they are counted
                from 0 already.

        Raises:
            ModelLoadError: A scale is not finite.
        """
        packed, offset = self._packed_of(target)
        form = self._forms[storage_of(target)].numbers
        numbers, scales, zeros = rows_in_form(form, packed.in_features, numbers, scales, zeros)
        try:
            packed.pack_whole(
                offset + first_row,
                numbers.contiguous().numpy(),
                scales.contiguous().numpy(),
                None if zeros is None else zeros.contiguous().numpy(),
            )
        except ValueError as error:
            raise _unpackable(packed, error) from error

    def takes_words(self, target: Tensor, form: NumberForm) -> bool:
        """Whether the words of a part are taken as they are stored: the layer's form is the part's."""
        return storage_of(target) in self._forms and self._forms[storage_of(target)].numbers == form

    def pack_words(self, target: Tensor, words: StoredWords) -> None:
        """Take all rows of a layer's weight, or of a part of it, that ``takes_words`` says are taken.

        Raises:
            ModelLoadError: A scale is not finite.
        """
        packed, offset = self._packed_of(target)
        try:
            packed.pack_words(
                offset,
                words.words.numpy(),
                words.layout,
                words.bits,
                words.less,
                words.scales.numpy(),
                None if words.zeros is None else words.zeros.numpy(),
                None if words.order is None else words.order.numpy().astype(np.uint32),
            )
        except ValueError as error:
            raise _unpackable(packed, error) from error

    def _packed_of(self, target: Tensor) -> LayerPlace:
        """The layer of a part, with room for all its parts, and the part's first row in it."""
        key = storage_of(target)
        out_features, in_features = self._shapes[key]
        packed = self._packed.get(key)
        if packed is None:
            form, numbers = self._forms[key], self._forms[key].numbers
            rounds = self._rounds and numbers.rounds_with(in_features)
            packed = _core.PackedLinear(
                self._threads,
                out_features,
                in_features,
                kind_of(numbers.bits, round_activations=rounds),
                numbers.group_size,
                scales=numbers.scales,
                zeros=numbers.zeros,
            )
            if form.input_order is not None:
                packed.set_input_order(form.input_order.numpy().astype(np.uint32))
            self._packed[key] = packed
        return packed, first_row_of(target, in_features)

    def _table_of(self, target: Tensor, type_name: str, row_bytes: int) -> tuple[BlockEmbedding, int]:
        """An embedding's blocks, with room for all of them, and the first row of the given part.

        No product reads the blocks, so they stay as they are. A rank's part of a vocabulary comes in pieces.
        """
        key = storage_of(target)
        shape = self._shapes[key]
        if key not in self._blocks:
            self._blocks[key] = BlockEmbedding(type_name, shape, row_bytes, target.dtype)
        return self._blocks[key], first_row_of(target, shape[1])

    def take_table(self, table: Tensor) -> BlockEmbedding | PackedEmbedding | None:
        """What looks vectors up in an embedding that was given and is not the head; None: it is not one of these."""
        if (blocks := self._blocks.pop(storage_of(table), None)) is not None:
            return blocks
        packed = self.take(table, None)
        return None if packed is None else PackedEmbedding(packed, table.dtype)

    def take(self, weight: Tensor, bias: Tensor | None) -> CoreLinear | None:
        """The kernel of a layer whose rows were all given; None: it is not one of these."""
        packed = self._packed.pop(storage_of(weight), None)
        return None if packed is None else CoreLinear.of_packed(packed, bias)


def _unpackable(packed: _core.PackedLinear, error: ValueError) -> ModelLoadError:
    return ModelLoadError(f"a weight of {packed.out_features} x {packed.in_features} cannot be packed: {error}")
