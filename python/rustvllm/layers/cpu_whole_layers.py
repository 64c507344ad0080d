"""Dense layers whose stored numbers are whole ones with scales: packed as they are, while they are read.

Blocks of GGUF files come here by rows, on their way from the file, so neither is anything rounded a second time nor is
the whole weight there as floating-point numbers. A layer that is stored in parts is taken if all its parts are of this
kind, with the smallest of their groups.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from rustvllm import _core
from rustvllm.exceptions import ModelLoadError
from rustvllm.layers.cpu_linear import CoreLinear, WeightKind
from rustvllm.layers.linear import Linear


class WholeLayers:
    """See the module.

    Args:
        threads: Which the products use.
        model: With or without memory.
        embedding: The model's, if that is the head, too: it is packed for the head, and filled for its look-ups.
        groups: Every tensor of the model that is stored, with how many of its numbers share a scale; None: they are not
            whole ones.
        kind: How they are packed: int8 or w8a8.
    """

    def __init__(
        self,
        threads: _core.CpuThreads,
        model: nn.Module,
        embedding: Tensor | None,
        groups: Sequence[tuple[Tensor, int | None]],
        kind: WeightKind,
    ) -> None:
        self._threads = threads
        self._kind: WeightKind = kind
        found: dict[int, list[int | None]] = {}
        for tensor, group in groups:
            found.setdefault(_storage(tensor), []).append(group)
        weights = [module.weight for module in model.modules() if isinstance(module, Linear)]
        self._embedding = None if embedding is None else _storage(embedding)
        self._groups: dict[int, int] = {}
        self._shapes: dict[int, tuple[int, int]] = {}
        for weight in [*weights, *([] if embedding is None else [embedding])]:
            parts = [group for group in found.get(_storage(weight), [None]) if group is not None]
            if parts and len(parts) == len(found[_storage(weight)]):
                self._groups[_storage(weight)] = min(parts)
                self._shapes[_storage(weight)] = (weight.shape[0], weight.shape[1])
        self._packed: dict[int, _core.PackedLinear] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def group_of(self, weight: Tensor) -> int | None:
        """How many numbers of a layer share a scale; None: it is not one of these."""
        return self._groups.get(_storage(weight))

    def is_enough(self, target: Tensor) -> bool:
        """Whether the layer computes without the tensor itself: all but an embedding that is the head do."""
        return _storage(target) != self._embedding

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
        key = _storage(target)
        out_features, in_features = self._shapes[key]
        packed = self._packed.get(key)
        if packed is None:
            packed = _core.PackedLinear(self._threads, out_features, in_features, self._kind, self._groups[key])
            self._packed[key] = packed
        first_row += int(target.storage_offset()) // in_features
        try:
            packed.pack_blocks(first_row, type_name, rows.numpy())
        except ValueError as error:
            raise ModelLoadError(f"a weight of {out_features} x {in_features} cannot be packed: {error}") from error

    def take(self, weight: Tensor, bias: Tensor | None) -> CoreLinear | None:
        """The kernel of a layer whose rows were all given; None: it is not one of these."""
        packed = self._packed.pop(_storage(weight), None)
        return None if packed is None else CoreLinear.of_packed(packed, bias)


def _storage(tensor: Tensor) -> int:
    """The same for all views of one memory, which on the meta device has no address."""
    identity: int = tensor.untyped_storage()._cdata  # noqa: SLF001 -- there is no public name
    return identity
