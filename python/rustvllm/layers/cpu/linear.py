"""What can compute a dense layer on the CPU: torch, oneDNN with the weight in its own order, and the Rust core.

No one of them is the fastest for every number of rows on every machine; ``choice`` measures them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

import torch
from torch import Tensor

from rustvllm import _core
from rustvllm.config.checkpoint.whole_forms import ScaleKind
from rustvllm.exceptions import ModelLoadError
from rustvllm.layers.activation import ACTIVATIONS, Activation
from rustvllm.layers.host_array import host_array
from rustvllm.layers.linear import LinearKernel, UnpackingKernel, plain_linear

CORE_DTYPES = (torch.float32, torch.bfloat16)
"""What the core's products take and give."""
WeightKind = Literal["f32", "bf16", "f16", "int8", "w8a8", "int6", "w6a8", "int4", "w4a8"]
"""What a number of a packed weight is; int8 and int4 have a scale per output, or per output and group of inputs, int6
per group of 16. So have w8a8, w4a8 and w6a8, which round the activations to 8 bits, too."""
_KINDS: dict[int, tuple[WeightKind, WeightKind]] = {8: ("int8", "w8a8"), 6: ("int6", "w6a8"), 4: ("int4", "w4a8")}
_CORE_KINDS: dict[torch.dtype, WeightKind] = {torch.float32: "f32", torch.bfloat16: "bf16"}
CoreActivation = Literal["gelu_tanh", "gelu_erf", "silu", "relu"]
_CORE_ACTIVATIONS: dict[Activation, CoreActivation] = {
    ACTIVATIONS["gelu_new"]: "gelu_tanh",
    ACTIVATIONS["gelu"]: "gelu_erf",
    ACTIVATIONS["silu"]: "silu",
    ACTIVATIONS["relu"]: "relu",
}
_ONEDNN_ACTIVATIONS = {
    None: ("none", ""),
    ACTIVATIONS["gelu_new"]: ("gelu", "tanh"),
    ACTIVATIONS["gelu"]: ("gelu", "none"),
    ACTIVATIONS["silu"]: ("swish", ""),
    ACTIVATIONS["relu"]: ("relu", ""),
}

NUM_ROW_CLASSES = 9
ROW_CLASSES = tuple(1 << exponent for exponent in range(NUM_ROW_CLASSES))
"""Numbers of rows that a kernel is chosen for: each stands for those above the one before it, the last for all more."""


def row_class(num_rows: int) -> int:
    """Index into ``ROW_CLASSES`` of a number of rows."""
    return min(max(num_rows - 1, 0).bit_length(), NUM_ROW_CLASSES - 1)


class TorchLinear:
    """torch's own product, from the weight as it is; see ``LinearKernel``."""

    nbytes = 0

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def unpack(self, num_outputs: int, first: int = 0) -> Tensor:
        """See ``UnpackingKernel``."""
        return self._weight[first : first + num_outputs].to(torch.float32)

    def forward(self, x: Tensor, activation: Activation | None, residual: Tensor | None) -> Tensor:
        """See ``LinearKernel.forward``."""
        return plain_linear(x, self._weight, self._bias, activation, residual)


class OneDnnLinear:
    """oneDNN's product, from a copy of the weight in the order that oneDNN likes; see ``LinearKernel``.

    Args:
        weight: ``[out_features, in_features]``, copied.
        bias: ``[out_features]`` or None, kept.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        # What torch's own compiler calls for prepacked weights; there is no public name.
        linear, reorder = (getattr(torch.ops.mkldnn, name) for name in _ONEDNN_OPERATORS)
        self._linear, self._linear_residual = linear.default, linear.binary
        self._packed = reorder(weight.contiguous(), _ONEDNN_ROWS)
        self._out_features = weight.shape[0]
        self._bias = bias
        self.nbytes = weight.nbytes

    @staticmethod
    def is_available(dtype: torch.dtype) -> bool:
        """Whether this torch has oneDNN's products, and in this dtype on this processor."""
        if dtype not in CORE_DTYPES or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return False
        if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # noqa: SLF001 -- no public name
            return False  # a processor without AVX-512 or its successors
        return all(hasattr(torch.ops.mkldnn, name) for name in _ONEDNN_OPERATORS)

    def unpack(self, num_outputs: int, first: int = 0) -> Tensor:
        """See ``UnpackingKernel``; the whole weight is there for a moment, because oneDNN knows no rows."""
        weight: Tensor = self._packed.to_dense()
        return weight[first : first + num_outputs].to(torch.float32)

    def forward(self, x: Tensor, activation: Activation | None, residual: Tensor | None) -> Tensor:
        """See ``LinearKernel.forward``."""
        if x.numel() == 0:
            return x.new_empty((*x.shape[:-1], self._out_features))
        x = x.contiguous()
        fused = _ONEDNN_ACTIVATIONS.get(activation)
        if residual is not None and activation is None:
            out: Tensor = self._linear_residual(x, residual.contiguous(), self._packed, self._bias, "add")
            return out
        name, algorithm = fused or ("none", "")
        out = self._linear(x, self._packed, self._bias, name, [], algorithm)
        if fused is None and activation is not None:
            out = activation(out)
        return out if residual is None else residual + out


_ONEDNN_OPERATORS = ("_linear_pointwise", "_reorder_linear_weight")
_ONEDNN_ROWS = 32
"""Rows that oneDNN chooses the order of a weight for; it computes any number from it."""


class CoreLinear:
    """The Rust core's product, from a packed copy of the weight; see ``LinearKernel``.

    A row's result is the same, bit for bit, whatever other rows there are; with ``use_matrix_unit`` it depends on
    whether they are many or few.

    Args:
        threads: Which compute.
        weight: ``[out_features, in_features]`` in any float dtype, copied.
        bias: ``[out_features]`` or None, copied.
        kind: Of the copy; None: as the weight is, which is float32 or bfloat16.
        group_size: Inputs that share a scale of an output, for weights that have scales; None: all.
        scales: How scales are kept; None: those of 4 bits in 16 bits, others in 32.

    Attributes:
        packed: The copy.

    Raises:
        ModelLoadError: A number that cannot become a whole one, because it is not finite or too large.
    """

    def __init__(
        self,
        threads: _core.CpuThreads,
        weight: Tensor,
        bias: Tensor | None,
        kind: WeightKind | None = None,
        group_size: int | None = None,
        *,
        scales: ScaleKind | None = None,
    ) -> None:
        out_features, in_features = weight.shape
        kind = kind or _CORE_KINDS[weight.dtype]
        self.packed = _core.PackedLinear(threads, out_features, in_features, kind, group_size, scales=scales)
        if weight.dtype not in CORE_DTYPES:
            weight = weight.to(torch.float32)
        try:
            self.packed.pack_rows(0, host_array(weight))
        except ValueError as error:  # a number that is not finite has no int8
            raise ModelLoadError(f"a weight of {out_features} x {in_features} cannot be packed: {error}") from error
        self._finish(bias)

    @classmethod
    def of_packed(cls, packed: _core.PackedLinear, bias: Tensor | None) -> Self:
        """The product of a weight that is packed already.

        Args:
            packed: All of its rows are there.
            bias: ``[out_features]`` or None, copied.
        """
        linear = cls.__new__(cls)
        linear.packed = packed
        linear._finish(bias)  # noqa: SLF001 -- it is one of this class
        return linear

    def _finish(self, bias: Tensor | None) -> None:
        if bias is not None:
            self.packed.set_bias(bias.to(torch.float32).numpy())
        self._out_features = self.packed.out_features
        self.nbytes = self.packed.nbytes
        self._is_quantized = self.packed.has_form

    @staticmethod
    def has_matrix_unit() -> bool:
        """Whether the processor has a matrix unit that the core's products can use."""
        return _core.PackedLinear.has_matrix_unit()

    @staticmethod
    def is_as_fast_as_the_processor(dtype: torch.dtype) -> bool:
        """Whether no other product can be much faster: the core multiplies such numbers by the widest instructions that
        there are, and reads weights as fast as memory is, on a processor without a matrix unit.
        """
        if _core.PackedLinear.has_matrix_unit() or _core.PackedLinear.kernel() != "avx512":
            return False
        narrow = _core.PackedLinear.bf16_kernel()[0] == "avx512-bf16"
        return dtype is torch.float32 or (dtype is torch.bfloat16 and narrow)

    @property
    def takes_matrix_unit(self) -> bool:
        """Whether ``use_matrix_unit`` decides anything: for rounded activations the core knows itself when it pays."""
        return self.packed.kind in ("f32", "bf16", "f16", "int8") and not self._is_quantized and self.has_matrix_unit()

    def use_matrix_unit(self, num_rows: int | None) -> None:
        """Have the matrix unit compute batches of at least so many rows; None disables it."""
        self.packed.set_matrix_rows(num_rows)

    def read(self) -> None:
        """Read the weight once and do nothing with it, by all threads: to measure what that takes."""
        self.packed.read()

    def unpack(self, num_outputs: int, first: int = 0) -> Tensor:
        """See ``UnpackingKernel``."""
        rows = torch.empty((num_outputs, self.packed.in_features), dtype=torch.float32)
        self.packed.unpack_rows(torch.arange(first, first + num_outputs).numpy(), rows.numpy())
        return rows

    def forward(self, x: Tensor, activation: Activation | None, residual: Tensor | None) -> Tensor:
        """See ``LinearKernel.forward``."""
        if x.dim() != 2:
            flat = None if residual is None else residual.flatten(0, -2)
            return self.forward(x.flatten(0, -2), activation, flat).view(*x.shape[:-1], self._out_features)
        x = with_whole_rows(x)
        residual = None if residual is None else with_whole_rows(residual)
        out = torch.empty((x.shape[0], self._out_features), dtype=x.dtype)
        fused = None if activation is None else core_activation(activation)
        if activation is not None and fused is None:
            self.packed.forward(host_array(x), host_array(out))
            out = activation(out)
            return out if residual is None else residual + out
        self.packed.forward(
            host_array(x),
            host_array(out),
            activation=fused,
            residual=None if residual is None else host_array(residual),
        )
        return out


def kind_of(bits: int, *, round_activations: bool) -> WeightKind:
    """The kind of weights of 4, 6 or 8 bits."""
    return _KINDS[bits][round_activations]


def with_whole_rows(x: Tensor) -> Tensor:
    """The same numbers with those of a row side by side, as the core reads them; rows may lie apart."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def core_activation(activation: Activation) -> CoreActivation | None:
    """What the core calls an activation that it can apply to a product; None: it has none such."""
    return _CORE_ACTIVATIONS.get(activation)


class LinearByRows:
    """One kernel or another, by the number of rows; see ``LinearKernel``.

    Args:
        kernels: One for each of ``ROW_CLASSES``.
    """

    def __init__(self, kernels: Sequence[LinearKernel]) -> None:
        if len(kernels) != NUM_ROW_CLASSES:
            raise ValueError(f"{len(kernels)} kernels were given for {NUM_ROW_CLASSES} classes of rows")
        self._kernels = tuple(kernels)
        self.nbytes = sum(kernel.nbytes for kernel in {id(kernel): kernel for kernel in kernels}.values())

    def unpack(self, num_outputs: int, first: int = 0) -> Tensor:
        """See ``UnpackingKernel``; the copies hold the same numbers."""
        kernel = next(kernel for kernel in self._kernels if isinstance(kernel, UnpackingKernel))
        return kernel.unpack(num_outputs, first)

    def forward(self, x: Tensor, activation: Activation | None, residual: Tensor | None) -> Tensor:
        """See ``LinearKernel.forward``."""
        num_rows = x.shape[0] if x.dim() == 2 else x[..., 0].numel()
        return self._kernels[row_class(num_rows)].forward(x, activation, residual)

    def kernel_of(self, index: int) -> LinearKernel:
        """What computes the rows of a class."""
        return self._kernels[index]
