"""``StaticAdapters``: which rows of a step in a CUDA graph have which adapter, in memory that stays where it is.

A graph launches the same programs over the same memory whatever its step's adapters are. There is room for as many
tiles of rows as any step of its size has, of which those beyond the step's have no rows; every layer has the programs
of the largest rank; and what the table says of the step's adapters is copied to a place of its own before the replay,
because the table moves when it grows.

All of it is written in the stream that replays, so a write waits for the replay that last read it, and a replay for the
write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rustvllm.lora.device_table import DeviceTable, Send, StepAdapters

if TYPE_CHECKING:
    from rustvllm.lora.layers import AdapterStep

Array = TypeVar("Array", Tensor, npt.NDArray[np.int32])

_ALIGNMENT: Final = 16
"""Numbers: kernels read whole lines of what begins on one."""


class StaticAdapters:
    """See the module; of graphs that are replayed one after another.

    Args:
        step: Says which adapters the step that runs has.
        table: Where their matrices lie.
        max_loras: Different adapters of a step at most.
        max_rank: Of an adapter at most.
        max_tokens: Of a graph at most.
        device: Where all of it lies.
    """

    def __init__(
        self,
        step: AdapterStep,
        table: DeviceTable,
        *,
        max_loras: int,
        max_rank: int,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        # Triton is not there on every machine.
        from rustvllm.kernels import lora

        self._kernels, self._step, self._table, self._max_loras = lora, step, table, max_loras
        self._num_ranks = max_rank * table.num_parts
        self._inputs = torch.zeros(self._num_inputs(max_tokens), dtype=torch.int32, device=device)
        self._of_adapters = torch.zeros((max_loras, *table.row_shape), dtype=torch.int64, device=device)

    def stage(self, num_tokens: int, stage: Send) -> Tensor | None:
        """What a graph of so many tokens needs to know of the step's adapters, to be looked at once it was sent.

        Returns:
            int32 ``[n]``; None: there are more adapters than there is room for.
        """
        runs = self._step.runs
        if len(runs) > self._max_loras:
            return None
        inputs = np.zeros(self._num_inputs(num_tokens), np.int32)
        slots, tiles, rows = self._views(inputs, num_tokens)
        of_runs = [(place, np.array(each, np.int32)) for place, (_, each) in enumerate(runs)]
        of_step = self._kernels.make_tiles(of_runs)
        slots[: len(runs)] = self._table.slots([adapter for adapter, _ in runs])
        rows[: of_step[0].size], tiles[: len(of_step[1])] = of_step
        return stage(inputs)

    def fill(self, staged: Tensor) -> None:
        """Put what ``stage`` gave where the graphs read it."""
        self._inputs[: staged.shape[0]].copy_(staged)
        torch.index_select(self._table.on_device(), 0, staged[: self._max_loras], out=self._of_adapters)

    def over(self, num_tokens: int, forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """A forward pass over so many tokens, in which layers add what is there of adapters: nothing, to begin with."""
        inputs = self._inputs[: self._num_inputs(num_tokens)]
        inputs.zero_()
        _, tiles, rows = self._views(inputs, num_tokens)
        adapters = StepAdapters(self._kernels.AdapterTiles(rows, tiles), self._of_adapters, self._num_ranks)

        def with_adapters() -> Tensor:
            with self._step.fixed(adapters):
                return forward()

        return with_adapters

    def _num_tiles(self, num_tokens: int) -> int:
        return num_tokens // self._kernels.TILE_ROWS + min(self._max_loras, num_tokens)

    def _num_inputs(self, num_tokens: int) -> int:
        return _aligned(self._max_loras) + _aligned(3 * self._num_tiles(num_tokens)) + num_tokens

    def _views(self, inputs: Array, num_tokens: int) -> tuple[Array, Array, Array]:
        """Of flat inputs: rows of the table ``[max_loras]``, tiles ``[num_tiles, 3]``, rows ``[num_tokens]``."""
        num_tiles = self._num_tiles(num_tokens)
        first_tile = _aligned(self._max_loras)
        first_row = first_tile + _aligned(3 * num_tiles)
        tiles = inputs[first_tile : first_tile + 3 * num_tiles].reshape(num_tiles, 3)
        return inputs[: self._max_loras], tiles, inputs[first_row : first_row + num_tokens]


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT
