"""A CPU tensor's own memory as numpy sees it, for the Rust core to read and write."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def host_array(tensor: Tensor) -> npt.NDArray[np.generic]:
    """A view, not a copy; bfloat16, which numpy does not know, is seen as uint16."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: npt.NDArray[np.generic] = tensor.numpy()
    return array
