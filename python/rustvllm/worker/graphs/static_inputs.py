"""``StaticInputs``: the layout of a graph's inputs in one array, so that one copy transfers a whole step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

Array = TypeVar("Array", Tensor, npt.NDArray[np.int32])

_ALIGNMENT = 16
"""Arrays begin at multiples of this many numbers, so that kernels read whole cache lines."""


@dataclass(frozen=True, slots=True)
class StaticInputs:
    """Arrays with one entry per token, followed by arrays with one entry per request.

    Attributes:
        num_of_tokens: Number of arrays of the first kind.
        num_tokens: Their length.
        num_of_requests: Number of arrays of the second kind.
        num_entries: Their minimum length.
    """

    num_of_tokens: int
    num_tokens: int
    num_of_requests: int
    num_entries: int

    @property
    def size(self) -> int:
        """The total of numbers."""
        widths = self.num_of_tokens * _aligned(self.num_tokens), self.num_of_requests * _aligned(self.num_entries)
        return sum(widths)

    def views(self, inputs: Array) -> tuple[Array, Array]:
        """Split ``size`` numbers into ``[num_of_tokens, num_tokens]`` and ``[num_of_requests, entries]``."""
        width = _aligned(self.num_tokens)
        end = self.num_of_tokens * width
        of_tokens = inputs[:end].reshape(self.num_of_tokens, width)[:, : self.num_tokens]
        return of_tokens, inputs[end : self.size].reshape(self.num_of_requests, _aligned(self.num_entries))


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT
