"""Dense layers that are stored as bfloat16: packed as they are, while they are read.

The model computes in float32, and its weight is never there in that type: what is read goes into the packed copy row by
row. Layers whose stored rows are not theirs (GPT-2's are stored the other way round) are packed once they are filled.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rustvllm import _core
from rustvllm.layers.cpu_linear import CoreLinear
from rustvllm.layers.host_array import host_array
from rustvllm.layers.whole_rows import storage_of


class Bf16Layers:
    """See the module.

    Args:
        threads: Which the products use.
        weights: Of layers all of whose parts are stored as bfloat16.
        stored: Every stored tensor of the model: the weights, or parts of them.
    """

    def __init__(self, threads: _core.CpuThreads, weights: Iterable[Tensor], stored: Iterable[Tensor]) -> None:
        self._threads = threads
        self._shapes = {storage_of(weight): (weight.shape[0], weight.shape[1]) for weight in weights}
        for part in stored:
            shape = self._shapes.get(storage_of(part))
            if shape is not None and not (part.dim() == 2 and part.is_contiguous() and part.shape[1] == shape[1]):
                del self._shapes[storage_of(part)]
        self._packed: dict[int, _core.PackedLinear] = {}

    def __len__(self) -> int:
        return len(self._shapes)

    def takes(self, target: Tensor) -> bool:
        """Whether rows of a tensor are wanted: of a weight, or of a part of one."""
        return storage_of(target) in self._shapes

    def pack_rows(self, target: Tensor, first_row: int, rows: Tensor) -> None:
        """Take rows of a weight, or of a part of it.

        Args:
            target: The weight or the part.
            first_row: Of the target.
            rows: uint8 ``[rows, 2 · in_features]``, as they are stored.
        """
        key = storage_of(target)
        out_features, in_features = self._shapes[key]
        packed = self._packed.get(key)
        if packed is None:
            packed = self._packed[key] = _core.PackedLinear(self._threads, out_features, in_features, "bf16")
        offset = int(target.storage_offset()) // in_features
        packed.pack_rows(offset + first_row, host_array(rows.view(torch.bfloat16)))

    def take(self, weight: Tensor, bias: Tensor | None) -> CoreLinear | None:
        """The kernel of a layer whose rows were given; None: they were not, its weight is filled."""
        packed = self._packed.pop(storage_of(weight), None)
        return None if packed is None else CoreLinear.of_packed(packed, bias)
