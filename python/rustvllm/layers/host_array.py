"""Shares a CPU tensor's memory with numpy, for the Rust core to read and write."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_LARGE_PAGE = 2 << 20


def host_array(tensor: Tensor) -> npt.NDArray[np.generic]:
    """A numpy view of a tensor; bfloat16, which numpy lacks, becomes uint16."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: npt.NDArray[np.generic] = tensor.numpy()
    return array


def empty_bytes(num_bytes: int) -> Tensor:
    """Allocate memory that will be filled soon, uint8 ``[num_bytes]``; in huge pages if it is long and they exist.

    The kernel provides huge pages several times as fast as small ones, and provides a page only when it is written to.
    """
    if num_bytes < _LARGE_PAGE:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    pages = mmap.mmap(-1, num_bytes + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    begin = -whole.data_ptr() % _LARGE_PAGE  # a mapping begins at any small page
    with suppress(OSError):  # without huge pages the kernel uses small ones
        pages.madvise(mmap.MADV_HUGEPAGE, begin, num_bytes // _LARGE_PAGE * _LARGE_PAGE)
    return whole[begin : begin + num_bytes]
