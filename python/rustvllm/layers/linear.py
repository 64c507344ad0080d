"""Dense layers whose parameters are allocated but not initialized, because the loader fills them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rustvllm.layers.activation import Activation
from rustvllm.layers.fused import runs_fused

_without_weights: ContextVar[bool] = ContextVar("dense layers are built without their weights' memory", default=False)


@contextmanager
def without_weights() -> Iterator[None]:
    """Build dense layers without memory for weights; the caller must later give each memory or a kernel."""
    token = _without_weights.set(True)
    try:
        yield
    finally:
        _without_weights.reset(token)


def empty_parameter(*shape: int) -> nn.Parameter:
    """An uninitialized parameter in torch's current default dtype and device, without gradient."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


def empty_parameter_like(other: Tensor, device: torch.device | str) -> nn.Parameter:
    """An uninitialized parameter with another tensor's shape and dtype, on a device.

    ``torch.empty_like`` of a tensor without memory would import torch's compiler, which takes seconds.
    """
    return nn.Parameter(torch.empty(other.shape, dtype=other.dtype, device=device), requires_grad=False)


class LinearKernel(Protocol):
    """Computes a dense layer from a copy of its weight in the kernel's own layout.

    Attributes:
        nbytes: Bytes of the copy; 0 if the kernel computes with the weight itself.
    """

    nbytes: int

    def forward(self, x: Tensor, activation: Activation | None, residual: Tensor | None) -> Tensor:
        """See ``Linear.forward``."""
        ...


@runtime_checkable
class UnpackingKernel(Protocol):
    """A kernel that can return the weight, so that the layer need not keep it."""

    def unpack(self, num_outputs: int, first: int = 0) -> Tensor:
        """Rows of the weight with the precision in which they are kept: float32 ``[num_outputs, in_features]``."""
        ...


@runtime_checkable
class WideRowsKernel(Protocol):
    """A kernel that also multiplies float32 rows, and then gives float32, whatever the model's dtype.

    Attributes:
        takes_wide_rows: True.
    """

    takes_wide_rows: bool


class EmbeddingKernel(Protocol):
    """Looks vectors up in the kernel's own form of an embedding."""

    def forward(self, ids: Tensor) -> Tensor:
        """See ``Embedding.forward``."""
        ...


class LinearAdapters(Protocol):
    """Adds adapters' products to a dense layer's product.

    Attributes:
        is_on: Whether :meth:`forward` computes the current step.
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
    *,
    in_place: bool = False,
) -> Tensor:
    """``activation(x Wᵀ + b) + residual`` by torch, one operation after the other.

    On a GPU the product itself adds the residual, in the residual's memory, if that may be overwritten (``in_place``)
    and there is no bias or activation.
    """
    if residual is not None and in_place and bias is None and activation is None and runs_fused(x):
        return residual.addmm_(x, weight.t())
    out = F.linear(x, weight, bias)
    if activation is not None:
        out = activation(out)
    return out if residual is None else residual + out


class Linear(nn.Module):
    """``y = activation(x Wᵀ + b) + residual``.

    Attributes:
        weight: ``[out_features, in_features]``; weights that files store transposed are turned while loading. Once a
            kernel has packed it, it may be without memory (on the meta device).
        bias: ``[out_features]`` or None.
        kernel: Computes the layer; None: torch does, with ``weight``.
        adapters: Adds adapters' products; None if the model serves no adapters.
        keeps_numbers: Whether a packed copy keeps the numbers of the weight, whatever other layers are rounded to.
        takes_adapters: Whether adapters can add to the layer: it computes all rows of a step, in their order.
        is_grouped: Whether the core computes it together with others of its shape, so that it is packed however small.
    """

    keeps_numbers: bool = False
    takes_adapters: bool = True
    is_grouped: bool = False

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__()
        if _without_weights.get():
            self.weight = nn.Parameter(torch.empty(out_features, in_features, device="meta"), requires_grad=False)
        else:
            self.weight = empty_parameter(out_features, in_features)
        self.bias = empty_parameter(out_features) if bias else None
        self.kernel: LinearKernel | None = None
        self.adapters: LinearAdapters | None = None

    def forward(
        self,
        x: Tensor,
        *,
        activation: Activation | None = None,
        residual: Tensor | None = None,
        in_place: bool = False,
    ) -> Tensor:
        """Compute the layer, and the operations after it in the same pass if the kernel can do that.

        Args:
            x: ``[..., in_features]``.
            activation: Applied to the product with the bias.
            residual: ``[..., out_features]``, added at the end.
            in_place: Whether the result may overwrite the residual, because the caller does not read it again.

        Returns:
            ``[..., out_features]``.
        """
        if self.adapters is not None and self.adapters.is_on:
            return self.adapters.forward(x, activation, residual)
        if self.kernel is not None:
            return self.kernel.forward(x, activation, residual)
        return plain_linear(x, self.weight, self.bias, activation, residual, in_place=in_place)

    def weight_rows(self, num_outputs: int, first: int = 0) -> Tensor:
        """Rows of the weight as the layer computes with it: float32 ``[num_outputs, in_features]``."""
        kernel: object = self.kernel
        if isinstance(kernel, UnpackingKernel):
            return kernel.unpack(num_outputs, first)
        return self.weight[first : first + num_outputs].to(torch.float32)

    def release_weight(self) -> None:
        """Free the memory of the weight, because the kernel has a copy; its shape and dtype remain."""
        self.weight = empty_parameter_like(self.weight, "meta")


class Embedding(nn.Module):
    """A table of vectors.

    Attributes:
        weight: ``[num_embeddings, embedding_dim]``; without memory if a kernel has the numbers.
        kernel: Looks vectors up; None: torch does, in ``weight``.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__()
        self.weight = empty_parameter(num_embeddings, embedding_dim)
        self.kernel: EmbeddingKernel | None = None

    def forward(self, ids: Tensor) -> Tensor:  # [...] int32 or int64 -> [..., embedding_dim]
        if self.kernel is not None:
            return self.kernel.forward(ids)
        return F.embedding(ids, self.weight)

    def release_weight(self) -> None:
        """Free the memory of the weight, because the kernel has its numbers; its shape and dtype remain."""
        self.weight = empty_parameter_like(self.weight, "meta")
