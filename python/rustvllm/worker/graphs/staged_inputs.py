"""``StagedInputs``: what a step that runs in a graph copies to the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from rustvllm.lora.static_adapters import StaticAdapters


@dataclass(frozen=True, slots=True)
class StagedInputs:
    """The inputs of a step; valid once the step has been sent.

    Attributes:
        inputs: int32; the kind of graph defines the layout.
        of_adapters: See ``StaticAdapters.stage``; None if the graph has no adapters.
    """

    inputs: Tensor
    of_adapters: Tensor | None

    def fill(self, adapters: StaticAdapters | None) -> None:
        """Copy the adapters' inputs, if there are any, to where the graph reads them."""
        if adapters is not None and self.of_adapters is not None:
            adapters.fill(self.of_adapters)
