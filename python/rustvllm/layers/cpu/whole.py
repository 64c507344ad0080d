"""Dense layers and embeddings that are stored as integers with scales: packed without change while they are read.

Blocks of GGUF files, and the integers of AWQ, GPTQ and compressed-tensors, arrive here row by row from the file, so
nothing is rounded a second time, and the whole weight never exists as floating-point numbers. A layer that is stored in
parts qualifies if all its parts are of this kind and order their inputs in the same way; it gets the smallest of their
group sizes.
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
        threads: The threads for the products.
        model: With or without memory.
        embedding: The model's embedding, if it is also the head; other embeddings are only looked up, and keep their
            blocks.
        forms: Every stored tensor of the model, with the form of its scales; None if its numbers are not integers.
        round_activations: Whether activations are rounded to 8 bits, where the groups allow it.
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
        """The form in which a layer's numbers are kept; None if it is not one of these layers."""
        form = self._forms.get(storage_of(weight))
        return None if form is None else form.numbers

    def described(self) -> str:
        """How many layers are kept in which bits and group sizes."""
        return described_forms(self._forms.values())

    def pack_blocks(self, target: Tensor, first_row: int, type_name: str, rows: Tensor) -> None:
        """Store rows of a layer's weight, or of a part of it.

        Args:
            target: The weight or the part.
            first_row: The first row's index in the target.
            type_name: The type of the blocks.
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
        """The memory for the blocks of an embedding used only for look-ups, or of a part of one; None for others.

        Args:
            target: The embedding or the part.
            type_name: The type of the blocks.
            row_bytes: Bytes of a vector's blocks.

        Returns:
            uint8 ``[rows, row_bytes]``, from the part's first row on.
        """
        if storage_of(target) not in self._forms or storage_of(target) not in self._only_looked_up:
            return None
        table, offset = self._table_of(target, type_name, row_bytes)
        return table.rows_from(offset)

    def layer_rows(self, target: Tensor) -> LayerPlace | None:
        """The packed layer of a weight, or of a part of one, and its first row there; None for other tensors."""
        key = storage_of(target)
        return self._packed_of(target) if key in self._forms and key not in self._only_looked_up else None

    def pack_whole(self, target: Tensor, first_row: int, numbers: Tensor, scales: Tensor, zeros: Tensor | None) -> None:
        """Store rows of a layer's weight, or of a part of it, given as integers and scales.

        Args:
            target: The weight or the part.
            first_row: The first row's index in the target.
            numbers: int8 ``[rows, in_features]``, in the order of the form's inputs.
            scales: float32 ``[rows, groups]`` of the part.
            zeros: float32 ``[rows, groups]``, zero points to be subtracted from the numbers; None if there are none.

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
        """Whether a part's words can be packed as stored, because the layer has the same form as the part."""
        return storage_of(target) in self._forms and self._forms[storage_of(target)].numbers == form

    def pack_words(self, target: Tensor, words: StoredWords) -> None:
        """Store all rows of a layer's weight, or of a part of it, if ``takes_words`` allows it.

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
        """A part's packed layer, with room for all its parts, and the part's first row in it."""
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

        No product reads the blocks, so they are not repacked. A rank's part of a vocabulary comes in pieces.
        """
        key = storage_of(target)
        shape = self._shapes[key]
        if key not in self._blocks:
            self._blocks[key] = BlockEmbedding(type_name, shape, row_bytes, target.dtype)
        return self._blocks[key], first_row_of(target, shape[1])

    def take_table(self, table: Tensor) -> BlockEmbedding | PackedEmbedding | None:
        """The kernel of an embedding that was passed and is not the head; None if it is not one of these."""
        if (blocks := self._blocks.pop(storage_of(table), None)) is not None:
            return blocks
        packed = self.take(table, None)
        return None if packed is None else PackedEmbedding(packed, table.dtype)

    def take(self, weight: Tensor, bias: Tensor | None) -> CoreLinear | None:
        """The kernel of a layer whose rows were all passed; None if it is not one of these."""
        packed = self._packed.pop(storage_of(weight), None)
        return None if packed is None else CoreLinear.of_packed(packed, bias)


def _unpackable(packed: _core.PackedLinear, error: ValueError) -> ModelLoadError:
    return ModelLoadError(f"a weight of {packed.out_features} x {packed.in_features} cannot be packed: {error}")
