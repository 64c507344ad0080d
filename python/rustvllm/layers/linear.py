"""Dense layers whose parameters are only allocated: the loader fills them, so nothing is initialised twice."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def empty_parameter(*shape: int) -> nn.Parameter:
    """An uninitialised parameter in torch's current default dtype and device; it takes no gradient."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class Linear(nn.Module):
    """``y = x Wᵀ + b``.

    Attributes:
        weight: ``[out_features, in_features]``; layouts stored the other way round are turned while loading.
        bias: ``[out_features]`` or None.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = empty_parameter(out_features, in_features)
        self.bias = empty_parameter(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:  # [..., in_features] -> [..., out_features]
        return F.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """A table of vectors.

    Attributes:
        weight: ``[num_embeddings, embedding_dim]``.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__()
        self.weight = empty_parameter(num_embeddings, embedding_dim)

    def forward(self, ids: Tensor) -> Tensor:  # [...] int32 or int64 -> [..., embedding_dim]
        return F.embedding(ids, self.weight)
