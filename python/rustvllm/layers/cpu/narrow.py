"""Dense layers and embeddings that are stored in 16 bits, and stay so: packed, or kept in a table for look-ups.

The model computes in float32, but its weights never exist in that type: rows that are read go into the packed copy one
by one, or into a table of the stored type. Layers whose stored rows are not rows of the weight (GPT-2 stores them
transposed) are packed once they are filled.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from rustvllm import _core
from rustvllm.layers.cpu.embedding import NarrowEmbedding
from rustvllm.layers.cpu.linear import CoreLinear
from rustvllm.layers.host_array import empty_bytes, host_array
from rustvllm.layers.whole_rows import LayerPlace, first_row_of, storage_of

NARROW_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}
"""torch dtypes by the names that files use."""
NARROW_KINDS: dict[torch.dtype, Literal["bf16", "f16"]] = {torch.bfloat16: "bf16", torch.float16: "f16"}
"""The format of packed weights for each dtype."""


class NarrowLayers:
    """See the module.

    Args:
        threads: The threads for the products.
        weights: The weights of layers, and of embeddings that are used only for look-ups, if all their parts are stored
            in one 16-bit type; with that type.
        tables: The embeddings among them.
        stored: Every stored tensor of the model: the weights, or parts of them.
    """

    def __init__(
        self,
        threads: _core.CpuThreads,
        weights: Iterable[tuple[Tensor, torch.dtype]],
        tables: Iterable[Tensor],
        stored: Iterable[Tensor],
    ) -> None:
        self._threads = threads
        self._forms = {storage_of(weight): (weight.shape[0], weight.shape[1], dtype) for weight, dtype in weights}
        self._tables = {storage_of(table) for table in tables}
        for part in stored:
            form = self._forms.get(storage_of(part))
            if form is not None and not (part.dim() == 2 and part.is_contiguous() and part.shape[1] == form[1]):
                del self._forms[storage_of(part)]
        self._packed: dict[int, _core.PackedLinear] = {}
        self._embeddings: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self._forms)

    def takes(self, target: Tensor) -> bool:
        """Whether a tensor is one of the weights, or a part of one, so that its stored rows are needed."""
        return storage_of(target) in self._forms

    def layer_rows(self, target: Tensor) -> LayerPlace | None:
        """See ``WholeLayers.layer_rows``."""
        return self._packed_of(target) if self.takes(target) and storage_of(target) not in self._tables else None

    def pack_blocks(self, target: Tensor, first_row: int, type_name: str, rows: Tensor) -> None:
        """Store rows of a weight, or of a part of it.

        Args:
            target: The weight or the part.
            first_row: The first row's index in the target.
            type_name: Not used: all parts have the weight's type.
            rows: uint8 ``[rows, 2 · in_features]``, as stored in the file.
        """
        del type_name
        if storage_of(target) in self._tables:
            table = self._table_rows(target)
            table[first_row : first_row + rows.shape[0]] = rows
            return
        packed, offset = self._packed_of(target)
        packed.pack_rows(offset + first_row, host_array(rows.view(torch.uint16)))

    def table_rows(self, target: Tensor, type_name: str, row_bytes: int) -> Tensor | None:
        """The memory for the rows of an embedding used only for look-ups, or of a part of one; None for other tensors.

        Args:
            target: The embedding or the part.
            type_name: Not used: all parts have the embedding's type.
            row_bytes: Not used: the type says it.

        Returns:
            uint8 ``[rows, 2 · width]``, from the part's first row on.
        """
        del type_name, row_bytes
        return self._table_rows(target) if self.takes(target) and storage_of(target) in self._tables else None

    def take(self, weight: Tensor, bias: Tensor | None) -> CoreLinear | None:
        """The kernel of a layer whose stored rows were packed; None if they were not, so that its weight is filled."""
        packed = self._packed.pop(storage_of(weight), None)
        return None if packed is None else CoreLinear.of_packed(packed, bias)

    def take_table(self, table: Tensor) -> NarrowEmbedding | None:
        """The kernel of an embedding whose stored rows were kept; None if they were not, so its weight is filled."""
        rows = self._embeddings.pop(storage_of(table), None)
        return None if rows is None else NarrowEmbedding(rows, table.dtype)

    def _packed_of(self, target: Tensor) -> LayerPlace:
        """A part's packed layer, with room for all its parts, and the part's first row in it."""
        key = storage_of(target)
        out_features, in_features, dtype = self._forms[key]
        packed = self._packed.get(key)
        if packed is None:
            kind = NARROW_KINDS[dtype]
            packed = self._packed[key] = _core.PackedLinear(self._threads, out_features, in_features, kind)
        return packed, first_row_of(target, in_features)

    def _table_rows(self, target: Tensor) -> Tensor:
        key = storage_of(target)
        num_vectors, width, dtype = self._forms[key]
        if key not in self._embeddings:
            self._embeddings[key] = empty_bytes(num_vectors * width * dtype.itemsize).view(dtype).view(-1, width)
        return self._embeddings[key].view(torch.uint8)[first_row_of(target, width) :]
