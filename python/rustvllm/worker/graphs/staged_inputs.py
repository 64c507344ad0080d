"""``StagedInputs``: what a step in a graph of either kind brings to the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from rustvllm.lora.static_adapters import StaticAdapters


@dataclass(frozen=True, slots=True)
class StagedInputs:
    """The inputs of a step, to be looked at once it was sent.

    Attributes:
        inputs: int32, of the kind of graph.
        of_adapters: See ``StaticAdapters.stage``; None: the graph has no adapters.
    """

    inputs: Tensor
    of_adapters: Tensor | None

    def fill(self, adapters: StaticAdapters | None) -> None:
        """Put what there is of adapters where the graph reads it."""
        if adapters is not None and self.of_adapters is not None:
            adapters.fill(self.of_adapters)
