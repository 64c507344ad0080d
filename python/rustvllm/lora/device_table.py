"""``DeviceTable``: where the matrices of each adapter lie on a GPU, and which rows of the step that runs have which.

A layer computes the products of all adapters of a step in two launches (``rustvllm.kernels.lora``), which find the
matrices by their addresses. So adapters come and go without moving others, each at its own rank. Memory of adapters and
of the table belongs to the stream that computes: what is freed is used again only after the kernels that read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rustvllm.lora.weights import ModuleDelta

if TYPE_CHECKING:
    from rustvllm.kernels.lora import AdapterTiles
    from rustvllm.layers.linear import Linear

Send = Callable[[npt.NDArray[np.generic]], Tensor]
"""Brings an array of the host to a device."""
_FIRST_SLOTS: Final = 8


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """The adapters of a step.

    Attributes:
        tiles: Which rows have which.
        table: int64 ``[num_adapters, num_layers, columns]``, where the matrices of those lie.
        num_ranks: What an adapter has in each layer at most, int64 ``[num_layers]``.
    """

    tiles: AdapterTiles
    table: Tensor
    num_ranks: npt.NDArray[np.int64]


class TableDelta:
    """What one adapter adds to one dense layer, with its matrices on a GPU.

    Args:
        deltas: Of the layer's parts, in their order.
        dtype: Of the layer's input and output.
        device: Where the layer computes.

    Attributes:
        nbytes: Of the weights.
        num_ranks: Of all parts.
    """

    def __init__(self, deltas: Sequence[ModuleDelta], dtype: torch.dtype, device: torch.device) -> None:
        down = torch.from_numpy(np.concatenate([delta.down.numpy() for delta in deltas])).to(dtype)
        self._down = down.to(device)
        self._parts = [
            (
                delta.part.first,
                delta.up.to(dtype).contiguous().to(device),
                None if delta.gains is None else delta.gains.contiguous().to(device),
            )
            for delta in deltas
        ]
        self.num_ranks = down.shape[0]
        tensors = [tensor for _, *of_part in self._parts for tensor in of_part if tensor is not None]
        self.nbytes = sum(tensor.nbytes for tensor in (self._down, *tensors))

    def columns(self) -> list[int]:
        """What the table says of it; see ``kernels.lora``."""
        columns, first_rank = [self._down.data_ptr(), self.num_ranks], 0
        for first, up, gains in self._parts:
            num_outputs, rank = up.shape
            columns += [up.data_ptr(), 0 if gains is None else gains.data_ptr(), rank, first_rank, first, num_outputs]
            first_rank += rank
        return columns


class DeviceTable:
    """See the module. Belongs to the thread that runs the model.

    Args:
        widths: Of each layer, by its ``id``: how many parts it has, and the outputs of the widest.
        send: Brings arrays to the device, in the order of what computes there.

    Attributes:
        num_parts: Of each layer, int64 ``[num_layers]``.
        row_shape: Of what the table says of an adapter.
        step: What :meth:`add` adds; None: nothing.
    """

    def __init__(self, widths: Mapping[int, tuple[int, int]], send: Send) -> None:
        # Triton is not there on every machine.
        from rustvllm.kernels import lora

        self._kernels, self._send = lora, send
        self._places = {layer: place for place, layer in enumerate(widths)}
        self._num_outputs = [num_outputs for _, num_outputs in widths.values()]
        self.num_parts: npt.NDArray[np.int64] = np.array([count for count, _ in widths.values()], np.int64)
        num_parts = int(self.num_parts.max(initial=1))
        self.row_shape = (len(widths), lora.LAYER_COLUMNS + num_parts * lora.PART_COLUMNS)
        self._host = np.zeros((_FIRST_SLOTS, *self.row_shape), np.int64)
        self._on_device: Tensor | None = None
        self._unsent: set[int] = set()
        self._slots: dict[int, int] = {}
        self._held: dict[int, Sequence[TableDelta]] = {}
        self.step: StepAdapters | None = None

    def put(self, number: int, deltas: Mapping[int, TableDelta]) -> None:
        """From now on steps may name this adapter.

        Args:
            number: The adapter's.
            deltas: What it adds, by the ``id`` of the layer.
        """
        taken = set(self._slots.values())
        slot = next((slot for slot in range(len(self._host)) if slot not in taken), len(self._host))
        if slot == len(self._host):
            self._host = np.concatenate([self._host, np.zeros_like(self._host)])
            self._on_device = None  # all of it is sent again
        self._host[slot] = 0
        for layer, delta in deltas.items():
            columns = delta.columns()
            self._host[slot, self._places[layer], : len(columns)] = columns
        self._slots[number], self._held[number] = slot, list(deltas.values())
        self._unsent.add(slot)

    def remove(self, number: int) -> None:
        """Forget an adapter, which no step may name any more."""
        self._slots.pop(number, None)
        self._held.pop(number, None)

    def begin(self, runs: Sequence[tuple[int, npt.NDArray[np.int32]]], stage: Send) -> None:
        """Say which rows of the step that comes have which adapter.

        Args:
            runs: Each adapter's number and its rows; none: the step has no adapters.
            stage: Brings the step's arrays to the device.
        """
        self.step = None
        if not runs:
            return
        table = self.on_device()
        slots = self.slots([number for number, _ in runs])
        of_runs = [(slot, rows) for slot, (_, rows) in zip(slots, runs, strict=True)]
        rows, tiles = map(stage, self._kernels.make_tiles(of_runs))
        self.step = StepAdapters(self._kernels.AdapterTiles(rows, tiles), table, self._host[slots, :, 1].max(axis=0))

    def slots(self, numbers: Sequence[int]) -> list[int]:
        """The rows of the table that say where the matrices of these adapters lie."""
        return [self._slots[number] for number in numbers]

    def on_device(self) -> Tensor:
        """The table on the device, int64 ``[num_adapters, num_layers, columns]``; it moves when it grows."""
        if self._on_device is None:
            self._on_device = self._send(self._host)
        else:
            for slot in self._unsent:
                self._on_device[slot] = self._send(self._host[slot])
        self._unsent.clear()
        return self._on_device

    def add(self, layer: int, x: Tensor, out: Tensor, bias: Tensor | None) -> None:
        """Multiply and add to a layer's output what the step's adapters say.

        Args:
            layer: Its ``id``.
            x: ``[num_tokens, in_features]``.
            out: ``[num_tokens, out_features]``, written.
            bias: ``[out_features]``, which is in it.
        """
        place = self._places[layer]
        if self.step is None or not (num_ranks := int(self.step.num_ranks[place])):
            return
        self._kernels.add_adapters(
            x if x.stride(-1) == 1 else x.contiguous(),
            out,
            bias,
            self.step.tiles,
            self.step.table[:, place],
            num_ranks=num_ranks,
            num_outputs=self._num_outputs[place],
        )

    def warm_up(self, linears: Iterable[Linear], dtype: torch.dtype, device: torch.device) -> None:
        """Launch what any step may launch, for a row whose adapter has no ranks.

        Args:
            linears: The layers.
            dtype: Of their inputs and outputs.
            device: Where they compute.
        """
        nothing = self._send(np.zeros((1, self.row_shape[1]), np.int64))
        rows, tiles = map(self._send, self._kernels.make_tiles([(0, np.zeros(1, np.int32))]))
        for linear in linears:
            out_features, in_features = linear.weight.shape
            self._kernels.add_adapters(
                torch.zeros((1, in_features), dtype=dtype, device=device),
                torch.zeros((1, out_features), dtype=dtype, device=device),
                linear.bias,
                self._kernels.AdapterTiles(rows, tiles),
                nothing,
                num_ranks=1,
                num_outputs=self._num_outputs[self._places[id(linear)]],
            )
