"""What runs adapters within a step: which rows have which, and the dense layers that add their products.

A step's rows are grouped by adapter once. Each layer then computes the model's own product for all rows and adds
``up (down x)`` to the rows of each adapter, in products of the adapter's rank. On the CPU these are the core's, whose
rows depend on no other, and a decoder that runs in one call of the core adds them there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from rustvllm import _core
from rustvllm.layers.activation import Activation
from rustvllm.layers.decoder import AdaptableDecoder, DecoderKernel
from rustvllm.layers.host_array import host_array
from rustvllm.layers.linear import Linear, plain_linear
from rustvllm.lora.modules import LinearPart
from rustvllm.lora.weights import ModuleDelta

_CORE_TYPES: Final = (torch.float32, torch.bfloat16)
Product = Callable[[Tensor], Tensor]
"""``[n, in]`` → ``[n, out]``."""


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
    """What one adapter adds to one dense layer: one product to the ranks of all fused parts, and one for each part.

    Parts of DoRA have gains, too, factors on the layer's own product.

    Args:
        deltas: Of the layer's parts.
        dtype: Of the layer's input and output.
        threads: What the core computes with; None: torch computes.

    Attributes:
        nbytes: Of the weights.
        core: What the core adds; None where torch computes.
    """

    def __init__(self, deltas: Sequence[ModuleDelta], dtype: torch.dtype, threads: _core.CpuThreads | None) -> None:
        # By numpy, in this thread alone, as in ``lora.weights``.
        down = torch.from_numpy(np.concatenate([delta.down.numpy() for delta in deltas])).to(dtype)
        ups = [delta.up.to(dtype) for delta in deltas]
        self.core: _core.CpuLayerDelta | None = None
        self._ups: list[tuple[LinearPart, slice, Product]] = []
        self._gains = [(delta.part, delta.gains) for delta in deltas if delta.gains is not None]
        if threads is not None and dtype in _CORE_TYPES:
            stretches = [
                (delta.part.first, _as_floats(up), None if delta.gains is None else _as_floats(delta.gains))
                for delta, up in zip(deltas, ups, strict=True)
            ]
            self.core = _core.CpuLayerDelta(threads, _as_floats(down), stretches)
            self.nbytes = self.core.nbytes
            return
        self.nbytes = down.nbytes + sum(up.nbytes for up in ups)
        self._down = torch_product(down)
        column = 0
        for delta, up in zip(deltas, ups, strict=True):
            end = column + delta.down.shape[0]
            self._ups.append((delta.part, slice(column, end), torch_product(up)))
            column = end

    def multiply(self, out: Tensor, bias: Tensor | None, rows: slice | Tensor) -> None:
        """Apply the gains to some rows of the layer's output, whose bias has none.

        Args:
            out: ``[num_tokens, out_features]``, written.
            bias: ``[out_features]``, which is in it.
            rows: Of it.
        """
        for part, gains in self._gains:
            outputs = slice(part.first, part.first + part.num_outputs)
            own = out[rows, outputs].to(torch.float32)
            if bias is None:
                own *= gains
            else:
                own.sub_(bias[outputs]).mul_(gains).add_(bias[outputs])
            out[rows, outputs] = own.to(out.dtype)

    def add(self, x: Tensor, out: Tensor, rows: slice | Tensor) -> None:
        """Add to some rows of the layer's output.

        Args:
            x: ``[num_tokens, in_features]``.
            out: ``[num_tokens, out_features]``, written.
            rows: Of both.
        """
        if self.core is not None:
            self.core.add(host_array(x.contiguous()), host_array(out), _tokens(rows))
            return
        ranks = self._down(x[rows])
        for part, columns, up in self._ups:
            out[rows, part.first : part.first + part.num_outputs] += up(ranks[:, columns])


def _as_floats(matrix: Tensor) -> npt.NDArray[np.generic]:
    """For the core, which keeps numbers that 16 bits hold in 16 again."""
    return host_array(matrix.to(torch.float32).contiguous())


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
                delta.multiply(out, self._linear.bias, rows)
                delta.add(x, out, rows)
        if activation is not None:
            out = activation(out)
        return out if residual is None else residual + out


class DecoderWithAdapters:
    """Runs the blocks in one call where that can add the step's adapters; see ``DecoderKernel``.

    Args:
        inner: Runs them in one call.
        step: Of the model.
    """

    def __init__(self, inner: DecoderKernel, step: AdapterStep) -> None:
        self._inner, self._step = inner, step
        self._adapters: dict[int, _core.CpuAdapter] = {}

    def make_adapter(self, deltas: Mapping[int, LinearDelta]) -> _core.CpuAdapter | None:
        """The adapter for the one call, from what it adds by the ``id`` of the layer; None: modules add it."""
        core = {layer: delta.core for layer, delta in deltas.items() if delta.core is not None}
        if not isinstance(self._inner, AdaptableDecoder) or len(core) < len(deltas):
            return None
        return self._inner.make_adapter(core)

    def put(self, number: int, adapter: _core.CpuAdapter | None) -> None:
        """From now on steps may name this adapter."""
        if adapter is not None:
            self._adapters[number] = adapter

    def remove(self, number: int) -> None:
        """Forget an adapter."""
        self._adapters.pop(number, None)

    def takes(self, hidden: Tensor, attention: object) -> bool:
        """See ``DecoderKernel.takes``."""
        has_all = all(adapter in self._adapters for adapter, _ in self._step.runs)
        return has_all and self._inner.takes(hidden, attention)

    def forward(
        self,
        hidden: Tensor,
        kv_caches: Sequence[Tensor],
        attention: object,
        rotary: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> Tensor:
        """See ``DecoderKernel.forward``."""
        if not self._step.runs:
            return self._inner.forward(hidden, kv_caches, attention, rotary)
        assert isinstance(self._inner, AdaptableDecoder)
        self._inner.adapters = [(self._adapters[adapter], _tokens(rows)) for adapter, rows in self._step.runs]
        try:
            return self._inner.forward(hidden, kv_caches, attention, rotary)
        finally:
            self._inner.adapters = ()


def _tokens(rows: slice | Tensor) -> Sequence[int]:
    return range(rows.start, rows.stop) if isinstance(rows, slice) else rows.tolist()


def torch_product(weight: Tensor) -> Product:
    """A product by torch."""
    return lambda x: F.linear(x, weight)


def by_layer(deltas: Sequence[ModuleDelta]) -> Mapping[int, list[ModuleDelta]]:
    """The parts that an adapter changes, by the ``id`` of their layer, each layer's in the order of its rows."""
    layers: dict[int, list[ModuleDelta]] = {}
    for delta in sorted(deltas, key=lambda delta: delta.part.first):
        layers.setdefault(id(delta.part.linear), []).append(delta)
    return layers
