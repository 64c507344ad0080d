"""Dense layers whose stored numbers are whole ones with scales: packed as they are, while they are read.

Blocks of GGUF files, and the numbers of AWQ, GPTQ and compressed-tensors, come here by rows, on their way from the
file, so neither is anything rounded a second time nor is the whole weight there as floating-point numbers. A layer that
is stored in parts is taken if all its parts are of this kind and have one order of their inputs, with the smallest of
their groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from rustvllm import _core
from rustvllm.exceptions import ModelLoadError
from rustvllm.layers.cpu_linear import CoreLinear, WeightKind
from rustvllm.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class WholeForm:
    """How a stored tensor's whole numbers have their scales.

    Attributes:
        group_size: How many numbers of a row share one.
        input_order: int64 ``[in_features]``, the inputs with those of a group side by side; None: they are neighbours.
    """

    group_size: int
    input_order: Tensor | None = None


class WholeLayers:
    """See the module.

    Args:
        threads: Which the products use.
        model: With or without memory.
        embedding: The model's, if that is the head, too: it is packed for the head, and filled for its look-ups.
        forms: Every tensor of the model that is stored, with how its numbers have scales; None: they are not whole
            ones.
        kind: How they are packed: int8 or w8a8.
    """

    def __init__(
        self,
        threads: _core.CpuThreads,
        model: nn.Module,
        embedding: Tensor | None,
        forms: Sequence[tuple[Tensor, WholeForm | None]],
        kind: WeightKind,
    ) -> None:
        self._threads = threads
        self._kind: WeightKind = kind
        found: dict[int, list[WholeForm | None]] = {}
        for tensor, form in forms:
            found.setdefault(storage_of(tensor), []).append(form)
        weights = [module.weight for module in model.modules() if isinstance(module, Linear)]
        self._embedding = None if embedding is None else storage_of(embedding)
        self._forms: dict[int, WholeForm] = {}
        self._shapes: dict[int, tuple[int, int]] = {}
        for weight in [*weights, *([] if embedding is None else [embedding])]:
            if (common := _common_form(found.get(storage_of(weight), []))) is not None:
                self._forms[storage_of(weight)] = common
                self._shapes[storage_of(weight)] = (weight.shape[0], weight.shape[1])
        self._packed: dict[int, _core.PackedLinear] = {}

    def __len__(self) -> int:
        return len(self._forms)

    def group_of(self, weight: Tensor) -> int | None:
        """How many numbers of a layer share a scale; None: it is not one of these."""
        form = self._forms.get(storage_of(weight))
        return None if form is None else form.group_size

    def is_enough(self, target: Tensor) -> bool:
        """Whether the layer computes without the tensor itself: all but an embedding that is the head do."""
        return storage_of(target) != self._embedding

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
        packed, offset = self._packed_of(target)
        try:
            packed.pack_blocks(offset + first_row, type_name, rows.numpy())
        except ValueError as error:
            raise _unpackable(packed, error) from error

    def pack_whole(self, target: Tensor, first_row: int, numbers: Tensor, scales: Tensor) -> None:
        """Take rows of a layer's weight, or of a part of it, as whole numbers and scales.

        Args:
            target: The weight or the part.
            first_row: Of the target.
            numbers: int8 ``[rows, in_features]``, in the order of the form's inputs.
            scales: float32 ``[rows, groups]`` of the part.

        Raises:
            ModelLoadError: A scale is not finite.
        """
        packed, offset = self._packed_of(target)
        num_groups = packed.in_features // self._forms[storage_of(target)].group_size
        if scales.shape[1] < num_groups:  # another part has smaller groups
            scales = scales.repeat_interleave(num_groups // scales.shape[1], dim=1)
        try:
            packed.pack_whole(offset + first_row, numbers.contiguous().numpy(), scales.contiguous().numpy())
        except ValueError as error:
            raise _unpackable(packed, error) from error

    def _packed_of(self, target: Tensor) -> tuple[_core.PackedLinear, int]:
        """The layer of a part, with room for all its parts, and the part's first row in it."""
        key = storage_of(target)
        out_features, in_features = self._shapes[key]
        packed = self._packed.get(key)
        if packed is None:
            form = self._forms[key]
            kind = self._kind if _can_round(form.group_size, in_features) else "int8"
            packed = _core.PackedLinear(self._threads, out_features, in_features, kind, form.group_size)
            if form.input_order is not None:
                packed.set_input_order(form.input_order.numpy().astype(np.uint32))
            self._packed[key] = packed
        return packed, int(target.storage_offset()) // in_features

    def take(self, weight: Tensor, bias: Tensor | None) -> CoreLinear | None:
        """The kernel of a layer whose rows were all given; None: it is not one of these."""
        packed = self._packed.pop(storage_of(weight), None)
        return None if packed is None else CoreLinear.of_packed(packed, bias)


def _common_form(parts: Sequence[WholeForm | None]) -> WholeForm | None:
    """The form in which all parts of a layer can be kept; None: there is none."""
    forms = [part for part in parts if part is not None]
    if not forms or len(forms) < len(parts):
        return None
    smallest = min(form.group_size for form in forms)
    if any(form.group_size % smallest for form in forms):
        return None
    order = forms[0].input_order
    for form in forms[1:]:
        is_same = order is form.input_order or (
            order is not None and form.input_order is not None and torch.equal(order, form.input_order)
        )
        if not is_same:
            return None
    return WholeForm(smallest, order)


def _can_round(group_size: int, in_features: int) -> bool:
    """Whether activations can be rounded in blocks that do not cross groups."""
    return group_size == 16 or group_size % 32 == 0 or group_size >= in_features


def _unpackable(packed: _core.PackedLinear, error: ValueError) -> ModelLoadError:
    return ModelLoadError(f"a weight of {packed.out_features} x {packed.in_features} cannot be packed: {error}")


def storage_of(tensor: Tensor) -> int:
    """The same for all views of one memory, which on the meta device has no address."""
    identity: int = tensor.untyped_storage()._cdata  # noqa: SLF001 -- there is no public name
    return identity
