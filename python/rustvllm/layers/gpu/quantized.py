"""Dense layers on a GPU that compute with stored integers of 4 and 8 bits; they are filled while the file is read.

A fused layer, such as query, key and value, qualifies if all its parts have integers and order their inputs in the same
way, as on the CPU. Its dense weight never exists on the device: models are built with dense layers whose weights have
no memory, and only the layers that do not qualify get memory later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from rustvllm import _core
from rustvllm.config.checkpoint.whole_forms import NumberForm
from rustvllm.exceptions import ModelLoadError
from rustvllm.kernels import quantized_matmul
from rustvllm.kernels.quantized_matmul import QuantizedWeight
from rustvllm.layers.activation import Activation
from rustvllm.layers.linear import Linear, LinearKernel, empty_parameter_like, plain_linear
from rustvllm.layers.whole_rows import (
    FEW_BITS,
    MIDDLE_4,
    LayerPlace,
    LayerRows,
    StoredWords,
    TableRows,
    WholeForm,
    common_forms,
    described_forms,
    first_row_of,
    rows_in_form,
    storage_of,
)
from rustvllm.logger import init_logger

logger = init_logger(__name__)

MOST_ROWS = 256
"""With more rows, the weight is unpacked once and torch multiplies: unpacking it for each tile would cost more."""
_BYTE = 8
"""The bits in which numbers of 6 bits are kept."""
_SCALES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "two-level": torch.float32}


class QuantizedLinear:
    """A ``LinearKernel`` and ``UnpackingKernel``.

    Args:
        weight: The weight, filled by the caller.
        bias: ``[out_features]`` or None.
        input_order: int64 ``[in_features]``, the input of each column of the weight; None if they are in order.

    Attributes:
        nbytes: Bytes of the weight.
        is_invariant: Whether a row's result is the same, bit for bit, regardless of other rows.
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, input_order: Tensor | None) -> None:
        self._weight, self._bias, self._order = weight, bias, input_order
        self.nbytes = weight.nbytes
        self.is_invariant = False

    def forward(self, x: Tensor, activation: Activation | None, residual: Tensor | None) -> Tensor:
        """See ``Linear.forward``."""
        rows = x.reshape(-1, x.shape[-1])
        rows = rows.contiguous() if self._order is None else rows.index_select(1, self._order)
        shape = (*x.shape[:-1], self._weight.out_features)
        flat = None if residual is None else residual.reshape(rows.shape[0], -1)
        if rows.shape[0] > MOST_ROWS and not self.is_invariant:
            dense = quantized_matmul.unpack(self._weight, x.dtype)
            return plain_linear(rows, dense, self._bias, activation, flat).view(shape)
        if activation is None:
            out = self._product(rows, flat)
        else:
            out = activation(self._product(rows, None))
            out = out if flat is None else flat + out
        return out.view(shape)

    def _product(self, rows: Tensor, residual: Tensor | None) -> Tensor:
        return quantized_matmul.quantized_linear(
            rows, self._weight, self._bias, residual, is_invariant=self.is_invariant
        )

    def unpack(self, num_outputs: int, first: int = 0) -> Tensor:
        """See ``UnpackingKernel.unpack``."""
        rows = quantized_matmul.unpack(self._weight, torch.float32, num_outputs, first)
        if self._order is None:
            return rows
        return torch.empty_like(rows).index_copy_(1, self._order, rows)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Launch every kernel that any number of rows may need, so that no request waits for a compiler.

        Args:
            dtype: The dtype of the activations.
        """
        weight = self._weight
        x = torch.zeros((1, weight.in_features), dtype=dtype, device=weight.numbers.device)
        few = quantized_matmul.few_rows(x)
        for count in (1, few + 1, MOST_ROWS + 1):
            rows = x.expand(count, -1)
            for residual in (None, torch.zeros((count, weight.out_features), dtype=dtype, device=x.device)):
                self.forward(rows, None, residual)
        self.unpack(min(weight.out_features, 1))


class _Room:
    """A weight that is being filled.

    Args:
        shape: ``(out_features, in_features)``.
        form: The form of its numbers and scales.
        device: Where they lie.
    """

    def __init__(self, shape: tuple[int, int], form: WholeForm, device: torch.device) -> None:
        (out_features, in_features), numbers = shape, form.numbers
        self.form, self.num_filled = form, 0
        is_few = numbers.bits == FEW_BITS
        width = quantized_matmul.nibble_bytes(in_features) if is_few else in_features
        kept = _SCALES[numbers.scales]
        per_group = (-(-in_features // numbers.group_size), out_features)
        offsets = {"middle": None, "point": torch.uint8, "minimum": kept}[numbers.zeros]
        self.weight = QuantizedWeight(
            torch.empty((out_features, width), dtype=torch.uint8 if is_few else torch.int8, device=device),
            torch.empty(per_group, dtype=kept, device=device),
            None if offsets is None else torch.empty(per_group, dtype=offsets, device=device),
            in_features,
            numbers.group_size,
        )

    def fill(self, first: int, numbers: Tensor, scales: Tensor, offsets: Tensor | None) -> None:
        """Store rows in the layer's form: int8 numbers, float32 scales, zero points or minima.

        Raises:
            ModelLoadError: A scale is not finite, or does not fit into the form's number format.
        """
        weight, end = self.weight, first + numbers.shape[0]
        if self.form.numbers.bits == FEW_BITS:
            shifted = numbers + MIDDLE_4 if self.form.numbers.zeros == "middle" else numbers
            numbers = quantized_matmul.pack_nibbles(shifted.to(torch.uint8))
        weight.numbers[first:end] = numbers.to(weight.numbers.device)
        for to, values in ((weight.scales, scales), (weight.offsets, offsets)):
            if to is None or values is None:
                continue
            kept = values.to(to.dtype)
            if not torch.equal(kept.to(torch.float32), values) or not bool(torch.isfinite(values).all()):
                raise ModelLoadError(
                    f"a weight of {weight.out_features} x {weight.in_features} has a scale, a zero point or a minimum "
                    f"in rows {first} to {end - 1} that is not finite or does not fit into {to.dtype}"
                )
            to[:, first:end] = kept.t().contiguous().to(to.device)
        self.num_filled += end - first


class DeviceLayers:
    """Packs the layers of a model on a GPU; see ``model_loader.filling.LayerPacker``.

    Args:
        outline: The model, which may have no memory yet.
        device: The device that computes its layers.
    """

    leaves_weights_out = True

    def __init__(self, outline: nn.Module, device: torch.device) -> None:
        self._device, self._dtype = device, next(outline.parameters()).dtype
        self._forms: dict[int, WholeForm] = {}
        self._shapes: dict[int, tuple[int, int]] = {}
        self._rooms: dict[int, _Room] = {}
        self._saved_bytes = 0

    def resident_bytes(self, plain_bytes: int) -> int:
        """The least memory that a model takes.

        Args:
            plain_bytes: The memory that it takes unpacked.
        """
        return plain_bytes - self._saved_bytes

    def plan(
        self,
        model: nn.Module,
        embedding: Tensor | None,
        forms: Sequence[tuple[Tensor, WholeForm | None]],
        narrow: Sequence[tuple[Tensor, torch.dtype]] = (),
    ) -> None:
        """Choose the layers that keep their stored numbers; call this again for every model.

        Args:
            model: With or without memory.
            embedding: The model's embedding, if it is also the head; it stays dense.
            forms: Every stored tensor of the model, with the form of its scales if its numbers are integers.
            narrow: Not used: floating-point weights of all types are dense on a GPU.
        """
        del narrow
        found = common_forms(forms)
        self._forms.clear()
        self._shapes.clear()
        self._rooms.clear()
        self._saved_bytes = 0
        for module in model.modules():
            if not isinstance(module, Linear) or module.weight is embedding:
                continue
            key = storage_of(module.weight)
            common = found.get(key)
            if common is None:
                continue
            if common.numbers.zeros == "codes":  # as the whole numbers that they stand for
                common = replace(common, numbers=NumberForm(common.numbers.group_size))
            elif common.numbers.bits not in (FEW_BITS, _BYTE):
                common = replace(common, numbers=replace(common.numbers, bits=_BYTE))
            self._forms[key] = common
            self._shapes[key] = shape = (module.weight.shape[0], module.weight.shape[1])
            self._saved_bytes += module.weight.nbytes - _num_bytes(common.numbers, *shape)

    def make_room(self, model: nn.Module) -> None:
        """Allocate the weights of dense layers that do not keep their stored numbers."""
        for module in model.modules():
            is_taken = isinstance(module, Linear) and storage_of(module.weight) in self._forms
            if isinstance(module, Linear) and module.weight.is_meta and not is_taken:
                module.weight = empty_parameter_like(module.weight, self._device)

    @property
    def packs_rows(self) -> bool:
        """Whether the loader must pass some layers as they are stored."""
        return bool(self._forms)

    @property
    def num_whole_layers(self) -> int:
        """How many layers keep their stored numbers."""
        return len(self._forms)

    @property
    def described_whole_layers(self) -> str:
        """The bits and groups in which they are kept."""
        return described_forms(self._forms.values()) or "none"

    def block_packer_of(self, target: Tensor) -> DeviceLayers | None:
        """This object for a layer whose rows it takes as they are stored; None: the tensor's values are wanted."""
        return self if storage_of(target) in self._forms else None

    def whole_packer_of(self, target: Tensor) -> DeviceLayers | None:
        """The same: all that it takes is integers with scales."""
        return self.block_packer_of(target)

    def pack_blocks(self, target: Tensor, first_row: int, type_name: str, rows: Tensor) -> None:
        """Store rows of a layer's weight, or of a part of it, given as blocks of a GGUF file.

        Args:
            target: The weight or the part.
            first_row: The first row's index in the target.
            type_name: The type of the blocks.
            rows: uint8 ``[rows, bytes of a row]``.

        Raises:
            ModelLoadError: A scale is not finite.
        """
        room, offset = self._room_of(target)
        form, (_, in_features) = room.form.numbers, self._shapes[storage_of(target)]
        numbers = np.empty((rows.shape[0], in_features), np.int8)
        scales = np.empty((rows.shape[0], -(-in_features // form.group_size)), np.float32)
        minima = np.empty_like(scales)
        _core.whole_blocks(type_name, rows.contiguous().numpy(), numbers, scales, minima)
        offsets = torch.from_numpy(minima) if form.zeros == "minimum" else None
        room.fill(offset + first_row, torch.from_numpy(numbers), torch.from_numpy(scales), offsets)

    def table_rows(self, target: Tensor, type_name: str, row_bytes: int) -> Tensor | None:
        """None: embeddings are dense on a GPU."""
        del target, type_name, row_bytes
        return None

    def layer_rows(self, target: Tensor) -> LayerPlace | None:
        """None: files are read into host memory first, and copied to the device from there."""
        del target
        return None

    def pack_files(self, layers: list[LayerRows], tables: list[TableRows]) -> tuple[int, Exception] | None:
        """Do nothing: ``layer_rows`` and ``table_rows`` return None, so there is nothing to read."""
        assert not layers, f"{len(layers)} tensors are packed for the CPU"
        assert not tables, f"{len(tables)} tables are read for the CPU"
        return None

    def takes_words(self, target: Tensor, form: NumberForm) -> bool:
        """Always False: the numbers are taken out of their words on the host."""
        del target, form
        return False

    def pack_words(self, target: Tensor, words: StoredWords) -> None:
        """Not called, see ``takes_words``."""
        raise AssertionError(f"words of {words.layout} for {tuple(target.shape)}")

    def pack_whole(self, target: Tensor, first_row: int, numbers: Tensor, scales: Tensor, zeros: Tensor | None) -> None:
        """Store rows given as integers and scales; see ``WholeLayers.pack_whole``.

        Raises:
            ModelLoadError: A scale is not finite.
        """
        room, offset = self._room_of(target)
        form, in_features = room.form.numbers, self._shapes[storage_of(target)][1]
        numbers, scales, zeros = rows_in_form(form, in_features, numbers, scales, zeros)
        offsets = scales * zeros if form.zeros == "minimum" and zeros is not None else zeros
        room.fill(offset + first_row, numbers, scales, offsets)

    def _room_of(self, target: Tensor) -> tuple[_Room, int]:
        """The weight of a part, and the part's first row in it."""
        key = storage_of(target)
        if key not in self._rooms:
            self._rooms[key] = _Room(self._shapes[key], self._forms[key], self._device)
        return self._rooms[key], first_row_of(target, self._shapes[key][1])

    def watch(self, model: nn.Module, embedding: Tensor | None) -> None:
        """See ``LayerPacker.watch``: layers have their memory from the beginning, so there is nothing to watch."""

    def filled(self, target: Tensor) -> None:
        """See ``LayerPacker.filled``."""

    def finish(self, model: nn.Module, embedding: Tensor | None) -> LinearKernel | None:
        """Make the layers compute with the stored numbers, and launch each kind of kernel once.

        Args:
            model: Filled.
            embedding: See ``plan``.

        Returns:
            None: torch computes a head that is also the embedding.
        """
        del embedding
        seen, nbytes = set(), 0
        for module in model.modules():
            room = self._rooms.pop(storage_of(module.weight), None) if isinstance(module, Linear) else None
            if room is None:
                continue
            assert isinstance(module, Linear)
            assert room.num_filled >= room.weight.out_features, "rows of a weight were not given"
            order = room.form.input_order
            kernel = QuantizedLinear(room.weight, module.bias, None if order is None else order.to(self._device))
            module.kernel, nbytes = kernel, nbytes + kernel.nbytes
            module.release_weight()
            key = (room.form.numbers, tuple(module.weight.shape), module.bias is None)
            if key not in seen and self._device.type == "cuda":
                kernel.warm_up(self._dtype)
            seen.add(key)
        if seen:
            logger.info("dense layers: %.1f MiB of integers and scales", nbytes / 2**20)
        return None


def _num_bytes(form: NumberForm, out_features: int, in_features: int) -> int:
    """The bytes of a weight on a GPU."""
    width = quantized_matmul.nibble_bytes(in_features) if form.bits == FEW_BITS else in_features
    kept = _SCALES[form.scales].itemsize
    each = kept + {"middle": 0, "point": 1, "minimum": kept}[form.zeros]
    return out_features * (width + -(-in_features // form.group_size) * each)
