"""Embeddings on the CPU in another form than the model computes in: in bfloat16, or packed for the head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rustvllm.layers.cpu_linear import CoreLinear


class NarrowEmbedding:
    """Vectors out of a table of a narrower type; see ``EmbeddingKernel``.

    Args:
        weight: ``[num_embeddings, embedding_dim]``, kept.
        dtype: Of the vectors that are looked up.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self._weight, self._dtype = weight, dtype

    def forward(self, ids: Tensor) -> Tensor:
        """See ``EmbeddingKernel.forward``."""
        return F.embedding(ids, self._weight).to(self._dtype)


class PackedEmbedding:
    """Vectors out of a head's packed weight, for an embedding that is the head, too; see ``EmbeddingKernel``.

    Args:
        head: Whose rows are the vectors.
        dtype: Of the vectors that are looked up.
    """

    def __init__(self, head: CoreLinear, dtype: torch.dtype) -> None:
        self._packed, self._dtype = head.packed, dtype

    def forward(self, ids: Tensor) -> Tensor:
        """See ``EmbeddingKernel.forward``."""
        vectors = torch.empty((ids.numel(), self._packed.in_features), dtype=torch.float32)
        self._packed.unpack_rows(ids.flatten().to(torch.int64).numpy(), vectors.numpy())
        return vectors.view(*ids.shape, self._packed.in_features).to(self._dtype)
