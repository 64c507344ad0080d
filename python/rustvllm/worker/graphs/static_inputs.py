"""``StaticInputs``: how the inputs of a graph lie in one row of numbers, so that one copy brings all of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

Array = TypeVar("Array", Tensor, npt.NDArray[np.int32])

_ALIGNMENT = 16
"""Numbers: kernels read whole lines of what begins on one."""


@dataclass(frozen=True, slots=True)
class StaticInputs:
    """Arrays as long as there is room for tokens, then arrays as long as there is room for requests.

    Attributes:
        num_of_tokens: Arrays of the first kind.
        num_tokens: Their length.
        num_of_requests: Arrays of the second kind.
        num_entries: Their length at least.
    """

    num_of_tokens: int
    num_tokens: int
    num_of_requests: int
    num_entries: int

    @property
    def size(self) -> int:
        """Numbers in all."""
        widths = self.num_of_tokens * _aligned(self.num_tokens), self.num_of_requests * _aligned(self.num_entries)
        return sum(widths)

    def views(self, inputs: Array) -> tuple[Array, Array]:
        """Of a row of ``size`` numbers both kinds: ``[num_of_tokens, num_tokens]``, ``[num_of_requests, entries]``."""
        width = _aligned(self.num_tokens)
        end = self.num_of_tokens * width
        of_tokens = inputs[:end].reshape(self.num_of_tokens, width)[:, : self.num_tokens]
        return of_tokens, inputs[end : self.size].reshape(self.num_of_requests, _aligned(self.num_entries))


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT
