"""What runs adapters within a step: which rows have which, and the dense layers that add their products.

A step's rows are grouped by adapter once. Each layer then computes the model's own product for all rows and adds
``up (down x)`` to the rows of each adapter, in two products of the adapter's rank. Rows of one request depend on no
other: with ``batch_invariant`` the products are the core's, whose rows are independent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from rustvllm.layers.activation import Activation
from rustvllm.layers.decoder import DecoderKernel
from rustvllm.layers.linear import Linear, plain_linear
from rustvllm.lora.weights import ModuleDelta

Product = Callable[[Tensor], Tensor]
"""``[n, in]`` → ``[n, out]``."""
MakeProduct = Callable[[Tensor], Product]
"""From a weight, ``[out, in]``."""


@dataclass(slots=True)
class AdapterStep:
    """Which rows of the step that runs have which adapter.

    Attributes:
        runs: Number of each adapter of the step, with its rows: all side by side, or int64 ``[n]``.
    """

    runs: Sequence[tuple[int, slice | Tensor]] = field(default_factory=tuple)

    def begin(self, adapters: npt.NDArray[np.int64], query_start_loc: npt.NDArray[np.int32]) -> None:
        """Group the rows of a step.

        Args:
            adapters: ``[num_reqs]``, of each request; 0: none.
            query_start_loc: ``[num_reqs + 1]``, where the rows of each begin.
        """
        self.runs = [
            (int(adapter), _rows(np.flatnonzero(adapters == adapter), query_start_loc))
            for adapter in np.unique(adapters)
            if adapter
        ]


def _rows(requests: npt.NDArray[np.int64], query_start_loc: npt.NDArray[np.int32]) -> slice | Tensor:
    starts, ends = query_start_loc[requests], query_start_loc[requests + 1]
    if (starts[1:] == ends[:-1]).all():
        return slice(int(starts[0]), int(ends[-1]))
    return torch.from_numpy(
        np.concatenate([np.arange(*pair) for pair in zip(starts, ends, strict=True)]).astype(np.int64)
    )


class LinearDelta:
    """What one adapter adds to one dense layer, all fused parts in two products.

    Args:
        deltas: Of the layer's parts.
        dtype: Of the layer's input and output.
        make_product: Makes a product from a weight.

    Attributes:
        nbytes: Of the two weights.
    """

    def __init__(self, deltas: Sequence[ModuleDelta], dtype: torch.dtype, make_product: MakeProduct) -> None:
        self._first = min(delta.part.first for delta in deltas)
        self._end = max(delta.part.first + delta.part.num_outputs for delta in deltas)
        down = torch.cat([delta.down for delta in deltas])
        up = torch.zeros((self._end - self._first, down.shape[0]))
        column = 0
        for delta in deltas:
            row, rank = delta.part.first - self._first, delta.down.shape[0]
            up[row : row + delta.part.num_outputs, column : column + rank] = delta.up
            column += rank
        self._down, self._up = make_product(down.to(dtype)), make_product(up.to(dtype))
        self.nbytes = (down.numel() + up.numel()) * dtype.itemsize

    def add(self, x: Tensor, out: Tensor, rows: slice | Tensor) -> None:
        """Add to some rows of the layer's output.

        Args:
            x: ``[num_tokens, in_features]``.
            out: ``[num_tokens, out_features]``, written.
            rows: Of both.
        """
        out[rows, self._first : self._end] += self._up(self._down(x[rows]))


class AdaptedLinear:
    """The adapters of one dense layer; see ``Linear.adapters``.

    Args:
        linear: The layer.
        step: Of the model.
        is_always_on: Whether steps without adapters take the same path, so that a row's bits do not depend on whether
            others have adapters.
    """

    def __init__(self, linear: Linear, step: AdapterStep, *, is_always_on: bool) -> None:
        self._linear, self._step, self._is_always_on = linear, step, is_always_on
        self.deltas: dict[int, LinearDelta] = {}

    @property
    def is_on(self) -> bool:
        """Whether the step that runs is computed here."""
        return bool(self._step.runs) or self._is_always_on

    def forward(self, x: Tensor, activation: Activation | None, residual: Tensor | None) -> Tensor:
        """See ``Linear.forward``."""
        kernel = self._linear.kernel
        if kernel is None:
            out = plain_linear(x, self._linear.weight, self._linear.bias)
        else:
            out = kernel.forward(x, None, None)
        for adapter, rows in self._step.runs:
            delta = self.deltas.get(adapter)
            if delta is not None:
                delta.add(x, out, rows)
        if activation is not None:
            out = activation(out)
        return out if residual is None else residual + out


class ModulesWithAdapters:
    """Runs the blocks in one call only where no adapter is added; see ``DecoderKernel``.

    Args:
        inner: Runs them in one call.
        step: Of the model.
    """

    def __init__(self, inner: DecoderKernel, step: AdapterStep) -> None:
        self._inner, self._step = inner, step

    def takes(self, hidden: Tensor, attention: object) -> bool:
        """See ``DecoderKernel.takes``."""
        return not self._step.runs and self._inner.takes(hidden, attention)

    def forward(
        self,
        hidden: Tensor,
        kv_caches: Sequence[Tensor],
        attention: object,
        rotary: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """See ``DecoderKernel.forward``."""
        return self._inner.forward(hidden, kv_caches, attention, rotary)


def torch_product(weight: Tensor) -> Product:
    """A product by torch."""
    return lambda x: F.linear(x, weight)


def by_layer(deltas: Sequence[ModuleDelta]) -> Mapping[int, list[ModuleDelta]]:
    """The parts that an adapter changes, by the ``id`` of their layer, each layer's in the order of its rows."""
    layers: dict[int, list[ModuleDelta]] = {}
    for delta in sorted(deltas, key=lambda delta: delta.part.first):
        layers.setdefault(id(delta.part.linear), []).append(delta)
    return layers
