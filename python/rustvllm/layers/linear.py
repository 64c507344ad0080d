"""Dense layers whose parameters are only allocated: the loader fills them, so nothing is initialised twice."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rustvllm.layers.activation import Activation


def empty_parameter(*shape: int) -> nn.Parameter:
    """An uninitialised parameter in torch's current default dtype and device; it takes no gradient."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class LinearKernel(Protocol):
    """Computes a dense layer from a copy of its weight in a layout of its own.

    Attributes:
        nbytes: Of that copy; 0 if it computes from the weight itself.
    """

    nbytes: int

    def forward(self, x: Tensor, activation: Activation | None, residual: Tensor | None) -> Tensor:
        """See ``Linear.forward``."""
        ...


class LinearAdapters(Protocol):
    """Adds adapters' products to a dense layer's.

    Attributes:
        is_on: Whether the step that runs is computed by :meth:`forward`.
    """

    @property
    def is_on(self) -> bool: ...

    def forward(self, x: Tensor, activation: Activation | None, residual: Tensor | None) -> Tensor:
        """See ``Linear.forward``."""
        ...


def plain_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """``activation(x Wᵀ + b) + residual`` by torch, one operation after the other."""
    out = F.linear(x, weight, bias)
    if activation is not None:
        out = activation(out)
    return out if residual is None else residual + out


class Linear(nn.Module):
    """``y = activation(x Wᵀ + b) + residual``.

    Attributes:
        weight: ``[out_features, in_features]``; layouts stored the other way round are turned while loading. Once a
            kernel has packed it there may be a shape without memory left (on the meta device).
        bias: ``[out_features]`` or None.
        kernel: What computes the layer; None: torch, from ``weight``.
        adapters: What adapters add to it; None: the model serves none.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = empty_parameter(out_features, in_features)
        self.bias = empty_parameter(out_features) if bias else None
        self.kernel: LinearKernel | None = None
        self.adapters: LinearAdapters | None = None

    def forward(self, x: Tensor, *, activation: Activation | None = None, residual: Tensor | None = None) -> Tensor:
        """The layer, and what follows it, in one pass where the kernel has that.

        Args:
            x: ``[..., in_features]``.
            activation: Applied to each number of the product, the bias included.
            residual: ``[..., out_features]``, added at the end.

        Returns:
            ``[..., out_features]``, new memory.
        """
        if self.adapters is not None and self.adapters.is_on:
            return self.adapters.forward(x, activation, residual)
        if self.kernel is not None:
            return self.kernel.forward(x, activation, residual)
        return plain_linear(x, self.weight, self.bias, activation, residual)

    def release_weight(self) -> None:
        """Free the memory of the weight, because the kernel has a copy; its shape and dtype remain."""
        self.weight = nn.Parameter(torch.empty_like(self.weight, device="meta"), requires_grad=False)


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
