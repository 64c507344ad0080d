"""What runs adapters within a step: which rows have which, and the dense layers that add their products.

A step's rows are grouped by adapter once. Each layer then computes the model's own product for all rows and adds
``up (down x)`` to the rows of each adapter, in products of the adapter's rank. On the CPU these are the core's, whose
rows depend on no other, and a decoder that runs in one call of the core adds them there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from rustvllm import _core
from rustvllm.layers.activation import Activation
from rustvllm.layers.decoder import DecoderKernel
from rustvllm.layers.host_array import host_array
from rustvllm.layers.linear import Linear, plain_linear
from rustvllm.lora.device_table import DeviceTable, Send, StepAdapters
from rustvllm.lora.modules import LinearPart
from rustvllm.lora.weights import ModuleDelta

_CORE_TYPES: Final = (torch.float32, torch.bfloat16)
Product = Callable[[Tensor], Tensor]
"""``[n, in]`` → ``[n, out]``."""


@dataclass(slots=True)
class AdapterStep:
    """Which rows of the step that runs have which adapter.

    Attributes:
        runs: Number of each adapter of the step, with its rows, ascending.
        table: Has them on a GPU where one kernel computes all adapters of a step; None: each is computed by itself.
    """

    runs: Sequence[tuple[int, Sequence[int]]] = field(default_factory=tuple)
    table: DeviceTable | None = None
    _indices: dict[int, Tensor] = field(default_factory=dict)
    _is_fixed: bool = False

    @property
    def is_on(self) -> bool:
        """Whether layers look for adapters of the step that runs."""
        return bool(self.runs) or self._is_fixed

    def begin(self, adapters: npt.NDArray[np.int64], query_start_loc: npt.NDArray[np.int32]) -> None:
        """Group the rows of a step.

        Args:
            adapters: ``[num_reqs]``, of each request; 0: none.
            query_start_loc: ``[num_reqs + 1]``, where the rows of each begin.
        """
        starts = query_start_loc.tolist()
        groups: dict[int, list[range]] = {}
        # Plain lists: numpy takes longer to begin than so few requests take.
        for request, adapter in enumerate(adapters.tolist()):
            if adapter:
                groups.setdefault(adapter, []).append(range(starts[request], starts[request + 1]))
        self.runs = [(adapter, _joined(pieces)) for adapter, pieces in groups.items()]
        self._indices = {}

    def stage(self, stage: Send | None) -> None:
        """Bring to the device what layers need that do not run in a graph.

        Args:
            stage: Brings arrays of the step to the device that runs the model; None: that is the host.
        """
        if self.table is not None:
            self.table.begin(
                [(adapter, np.array(rows, np.int32)) for adapter, rows in self.runs], stage or torch.from_numpy
            )
        elif stage is not None:  # for torch, which would wait for the device
            self._indices = {adapter: stage(np.array(rows, np.int64)) for adapter, rows in self.runs}

    @contextmanager
    def fixed(self, adapters: StepAdapters) -> Iterator[None]:
        """Layers that run meanwhile add these, whatever the step has: a graph of them is captured."""
        assert self.table is not None
        before, self.table.step, self._is_fixed = self.table.step, adapters, True
        try:
            yield
        finally:
            self.table.step, self._is_fixed = before, False

    def index(self, adapter: int, rows: Sequence[int]) -> slice | Tensor:
        """The rows of an adapter as torch wants them."""
        if isinstance(rows, range):
            return slice(rows.start, rows.stop)
        if adapter not in self._indices:
            self._indices[adapter] = torch.tensor(rows)
        return self._indices[adapter]


def _joined(pieces: Sequence[range]) -> Sequence[int]:
    """One stretch where the pieces lie side by side."""
    if all(one.stop == other.start for one, other in pairwise(pieces)):
        return range(pieces[0].start, pieces[-1].stop)
    return list(chain.from_iterable(pieces))


class LinearDelta:
    """What one adapter adds to one dense layer: one product to the ranks of all fused parts, and one for each part.

    Parts of DoRA have gains, too, factors on the layer's own product.

    Args:
        deltas: Of the layer's parts.
        dtype: Of the layer's input and output.
        kept: What the matrices are rounded to; by torch they are computed with in ``dtype``.
        threads: What the core computes with; None: torch computes.
        device: Where torch does.

    Attributes:
        nbytes: Of the weights.
        core: What the core adds; None where torch computes.
    """

    def __init__(
        self,
        deltas: Sequence[ModuleDelta],
        dtype: torch.dtype,
        kept: torch.dtype,
        threads: _core.CpuThreads | None,
        device: torch.device,
    ) -> None:
        # By numpy, in this thread alone, as in ``lora.weights``.
        down = (
            deltas[0].down if len(deltas) == 1 else torch.from_numpy(np.concatenate([d.down.numpy() for d in deltas]))
        )
        self.core: _core.CpuLayerDelta | None = None
        self._ups: list[tuple[LinearPart, slice, Product]] = []
        self._gains = [(delta.part, delta.gains.to(device)) for delta in deltas if delta.gains is not None]
        if threads is not None and dtype in _CORE_TYPES:
            stretches = [
                (delta.part.first, host_array(delta.up), None if delta.gains is None else host_array(delta.gains))
                for delta in deltas
            ]
            self.core = _core.CpuLayerDelta(threads, host_array(down), stretches, kept is torch.bfloat16)
            self.nbytes = self.core.nbytes
            return
        down, ups = down.to(kept).to(dtype), [delta.up.to(kept).to(dtype) for delta in deltas]
        self.nbytes = down.nbytes + sum(up.nbytes for up in ups)
        self._down = torch_product(down.to(device))
        column = 0
        for delta, up in zip(deltas, ups, strict=True):
            end = column + delta.down.shape[0]
            self._ups.append((delta.part, slice(column, end), torch_product(up.to(device))))
            column = end

    @property
    def has_gains(self) -> bool:
        """Whether :meth:`multiply` changes anything."""
        return bool(self._gains)

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
        """Add to some rows of the layer's output, by torch.

        Args:
            x: ``[num_tokens, in_features]``.
            out: ``[num_tokens, out_features]``, written.
            rows: Of both.
        """
        ranks = self._down(x[rows])
        for part, columns, up in self._ups:
            out[rows, part.first : part.first + part.num_outputs] += up(ranks[:, columns])


class AdaptedLinear:
    """The adapters of one dense layer; see ``Linear.adapters``.

    Args:
        linear: The layer.
        step: Of the model.
        is_always_on: Whether steps without adapters take the same path, so that a row's bits do not depend on whether
            others have adapters.

    Attributes:
        linear: The layer.
        deltas: What each adapter adds, by its number.
    """

    def __init__(self, linear: Linear, step: AdapterStep, *, is_always_on: bool) -> None:
        self.linear, self._step, self._is_always_on = linear, step, is_always_on
        self.deltas: dict[int, LinearDelta] = {}

    @property
    def is_on(self) -> bool:
        """Whether the step that runs is computed here."""
        return self._step.is_on or self._is_always_on

    def forward(self, x: Tensor, activation: Activation | None, residual: Tensor | None) -> Tensor:
        """See ``Linear.forward``."""
        kernel = self.linear.kernel
        out = plain_linear(x, self.linear.weight, self.linear.bias) if kernel is None else kernel.forward(x, None, None)
        if self._step.is_on and self._step.table is not None:
            self._step.table.add(id(self.linear), x, out, self.linear.bias)
        for adapter, rows in self._step.runs:
            delta = self.deltas.get(adapter)  # None where the table has it
            if delta is None:
                continue
            if delta.has_gains:
                delta.multiply(out, self.linear.bias, self._step.index(adapter, rows))
            if delta.core is not None:
                delta.core.add(host_array(x.contiguous()), host_array(out), rows)
            else:
                delta.add(x, out, self._step.index(adapter, rows))
        if activation is not None:
            out = activation(out)
        return out if residual is None else residual + out


class AdaptedDecoder:
    """The adapters that the one call of a model's blocks can add; see ``DecoderKernel.adapters``.

    Args:
        kernel: Makes that call, and asks this object from now on.
        step: Of the model.
    """

    def __init__(self, kernel: DecoderKernel, step: AdapterStep) -> None:
        self._kernel, self._step = kernel, step
        self._adapters: dict[int, _core.CpuAdapter] = {}
        kernel.adapters = self

    def make_adapter(self, deltas: Mapping[int, LinearDelta]) -> _core.CpuAdapter | None:
        """The adapter for the one call, from what it adds by the ``id`` of the layer; None: modules add it."""
        core = {layer: delta.core for layer, delta in deltas.items() if delta.core is not None}
        return self._kernel.make_adapter(core) if len(core) == len(deltas) else None

    def put(self, number: int, adapter: _core.CpuAdapter | None) -> None:
        """From now on steps may name this adapter."""
        if adapter is not None:
            self._adapters[number] = adapter

    def remove(self, number: int) -> None:
        """Forget an adapter."""
        self._adapters.pop(number, None)

    def of_step(self) -> Sequence[tuple[_core.CpuAdapter, Sequence[int]]] | None:
        """See ``DecoderAdapters.of_step``."""
        if not all(adapter in self._adapters for adapter, _ in self._step.runs):
            return None
        return [(self._adapters[adapter], rows) for adapter, rows in self._step.runs]


def torch_product(weight: Tensor) -> Product:
    """A product by torch."""
    return lambda x: F.linear(x, weight)


def by_layer(deltas: Sequence[ModuleDelta]) -> Mapping[int, list[ModuleDelta]]:
    """The parts that an adapter changes, by the ``id`` of their layer, each layer's in the order of its rows."""
    layers: dict[int, list[ModuleDelta]] = {}
    for delta in sorted(deltas, key=lambda delta: delta.part.first):
        layers.setdefault(id(delta.part.linear), []).append(delta)
    return layers
