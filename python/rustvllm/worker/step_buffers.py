"""The arrays of one step, shared with the Rust core: torch memory (pinned for a GPU) that numpy sees as well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BufferSpec = Sequence[tuple[str, str, tuple[int, ...]]]
"""Name, dtype and shape of every array of a set, as ``_core.step_buffer_spec`` gives them."""

_DTYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}


class StepBuffers:
    """One set. The core writes it in ``schedule`` and the runner reads it until ``update_from_output``.

    Attributes:
        tensors: the arrays as torch sees them.
        arrays: the same memory as numpy sees it.
    """

    def __init__(self, spec: BufferSpec, *, pin_memory: bool) -> None:
        self.tensors: dict[str, Tensor] = {
            name: torch.zeros(shape, dtype=_DTYPES[dtype], device="cpu", pin_memory=pin_memory)
            for name, dtype, shape in spec
        }
        self.arrays: dict[str, npt.NDArray[Any]] = {name: tensor.numpy() for name, tensor in self.tensors.items()}

    def int32(self, name: str, length: int) -> npt.NDArray[np.int32]:
        """The first entries of an int32 array, on the host."""
        return self.arrays[name][:length]

    def on_device(self, name: str, length: int, device: torch.device) -> Tensor:
        """The first entries of an array, on a device (the same memory on CPU)."""
        return self.tensors[name][:length].to(device, non_blocking=True)
