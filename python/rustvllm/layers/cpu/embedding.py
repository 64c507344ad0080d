"""Embeddings on the CPU in another form than the model's dtype: bfloat16, blocks of a file, or packed for the head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rustvllm import _core
from rustvllm.layers.cpu.linear import CoreLinear
from rustvllm.layers.host_array import empty_bytes


class NarrowEmbedding:
    """Looks vectors up in a table of a narrower type; see ``EmbeddingKernel``.

    Args:
        weight: ``[num_embeddings, embedding_dim]``; not copied.
        dtype: The dtype of the result.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self._weight, self._dtype = weight, dtype

    def forward(self, ids: Tensor) -> Tensor:
        """See ``EmbeddingKernel.forward``."""
        return F.embedding(ids, self._weight).to(self._dtype)


class PackedEmbedding:
    """Looks vectors up in a head's packed weight, for an embedding that is also the head; see ``EmbeddingKernel``.

    Args:
        head: The head, whose weight rows are the vectors.
        dtype: The dtype of the result.
    """

    def __init__(self, head: CoreLinear, dtype: torch.dtype) -> None:
        self._packed, self._dtype = head.packed, dtype

    def forward(self, ids: Tensor) -> Tensor:
        """See ``EmbeddingKernel.forward``."""
        vectors = torch.empty((ids.numel(), self._packed.in_features), dtype=torch.float32)
        self._packed.unpack_rows(ids.flatten().to(torch.int64).numpy(), vectors.numpy())
        return vectors.view(*ids.shape, self._packed.in_features).to(self._dtype)


class BlockEmbedding:
    """Looks vectors up in a GGUF file's blocks and unpacks them each time; see ``EmbeddingKernel``.

    Args:
        type_name: The type of the blocks.
        shape: The number of vectors and their width.
        row_bytes: Bytes of a vector's blocks.
        dtype: The dtype of the result.
    """

    def __init__(self, type_name: str, shape: tuple[int, int], row_bytes: int, dtype: torch.dtype) -> None:
        self._type_name, self._width, self._dtype = type_name, shape[1], dtype
        self._rows = empty_bytes(shape[0] * row_bytes).view(-1, row_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks."""
        return self._rows.nbytes

    def fill(self, first_row: int, rows: Tensor) -> None:
        """Store some vectors' blocks, uint8 ``[rows, row_bytes]``."""
        self._rows[first_row : first_row + rows.shape[0]] = rows

    def rows_from(self, first_row: int) -> Tensor:
        """The memory of the vectors' blocks from ``first_row`` on, to read a file into."""
        return self._rows[first_row:]

    def forward(self, ids: Tensor) -> Tensor:
        """See ``EmbeddingKernel.forward``."""
        rows = F.embedding(ids.flatten(), self._rows)
        vectors = torch.empty((ids.numel(), self._width), dtype=torch.float32)
        _core.unpack_blocks(self._type_name, rows.view(-1).numpy(), vectors.view(-1).numpy())
        return vectors.view(*ids.shape, self._width).to(self._dtype)
