"""Kernels for dense layers on the CPU: torch, oneDNN with the weight in its own order, and the Rust core.

None of them is fastest for every number of rows on every machine, so ``choice`` measures them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

import torch
from torch import Tensor

from rustvllm import _core
from rustvllm.config.checkpoint.whole_forms import ScaleKind
from rustvllm.exceptions import ModelLoadError
from rustvllm.layers.activation import ACTIVATIONS, Activation, clamped_silu
from rustvllm.layers.host_array import host_array
from rustvllm.layers.linear import LinearKernel, UnpackingKernel, plain_linear

CORE_DTYPES = (torch.float32, torch.bfloat16)
"""The dtypes of inputs and outputs of the core's products."""
WeightKind = Literal["f32", "bf16", "f16", "int8", "w8a8", "int6", "w6a8", "int4", "w4a8"]
"""The number format of a packed weight. int8 and int4 have a scale per output, or per output and group of inputs; int6
has one per group of 16. w8a8, w4a8 and w6a8 have the same scales, and also round the activations to 8 bits."""
_KINDS: dict[int, tuple[WeightKind, WeightKind]] = {8: ("int8", "w8a8"), 6: ("int6", "w6a8"), 4: ("int4", "w4a8")}
_CORE_KINDS: dict[torch.dtype, WeightKind] = {torch.float32: "f32", torch.bfloat16: "bf16"}
CoreActivation = Literal["gelu_tanh", "gelu_erf", "silu", "relu", "clamped_silu"]
_CORE_ACTIVATIONS: dict[Activation, CoreActivation] = {
    ACTIVATIONS["gelu_new"]: "gelu_tanh",
    ACTIVATIONS["gelu"]: "gelu_erf",
    ACTIVATIONS["silu"]: "silu",
    ACTIVATIONS["relu"]: "relu",
    clamped_silu: "clamped_silu",
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
"""Numbers of rows for which a kernel is chosen: each stands for all above the previous one, the last also for more."""


def row_class(num_rows: int) -> int:
    """The index into ``ROW_CLASSES`` for a number of rows."""
    return min(max(num_rows - 1, 0).bit_length(), NUM_ROW_CLASSES - 1)


class TorchLinear:
    """torch's product with the unpacked weight; see ``LinearKernel``."""

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
    """oneDNN's product with a copy of the weight in oneDNN's preferred order; see ``LinearKernel``.

    Args:
        weight: ``[out_features, in_features]``, copied.
        bias: ``[out_features]`` or None, kept.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        # torch's compiler calls these operators for prepacked weights; they have no public names.
        linear, reorder = (getattr(torch.ops.mkldnn, name) for name in _ONEDNN_OPERATORS)
        self._linear, self._linear_residual = linear.default, linear.binary
        self._packed = reorder(weight.contiguous(), _ONEDNN_ROWS)
        self._out_features = weight.shape[0]
        self._bias = bias
        self.nbytes = weight.nbytes

    @staticmethod
    def is_available(dtype: torch.dtype) -> bool:
        """Whether this torch has oneDNN's products, for this dtype on this processor."""
        if dtype not in CORE_DTYPES or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return False
        if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # noqa: SLF001 -- no public name
            return False  # a processor without AVX-512 or its successors
        return all(hasattr(torch.ops.mkldnn, name) for name in _ONEDNN_OPERATORS)

    def unpack(self, num_outputs: int, first: int = 0) -> Tensor:
        """See ``UnpackingKernel``; unpacks the whole weight for a moment, because oneDNN cannot unpack single rows."""
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
"""The number of rows for which oneDNN chooses the order of a weight; the result works for any number."""


class CoreLinear:
    """The Rust core's product with a packed copy of the weight; see ``LinearKernel``.

    A row's result is the same, bit for bit, regardless of other rows. With ``use_matrix_unit`` it depends on whether
    there are at least as many rows as given there.

    Args:
        threads: The threads that compute.
        weight: ``[out_features, in_features]`` in any float dtype, copied.
        bias: ``[out_features]`` or None, copied.
        kind: The number format of the copy; None keeps the weight's, which is float32 or bfloat16.
        group_size: How many inputs of an output share a scale, for formats with scales; None: all.
        scales: The number format of the scales; None: 16 bits for weights of 4 bits, else 32.

    Attributes:
        packed: The copy.

    Raises:
        ModelLoadError: A number cannot be rounded to an integer, because it is not finite or too large.
    """

    takes_wide_rows = True
    """See ``WideRowsKernel``."""

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
        """A kernel for a weight that is already packed.

        Args:
            packed: The weight, with all of its rows.
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
        """Whether no other product can be much faster: on a processor without a matrix unit, the core multiplies these
        numbers with the widest instructions, and reads weights as fast as memory delivers them.
        """
        if _core.PackedLinear.has_matrix_unit() or _core.PackedLinear.kernel() != "avx512":
            return False
        narrow = _core.PackedLinear.bf16_kernel()[0] == "avx512-bf16"
        return dtype is torch.float32 or (dtype is torch.bfloat16 and narrow)

    @property
    def takes_matrix_unit(self) -> bool:
        """Whether ``use_matrix_unit`` has an effect: with rounded activations the core itself decides when it pays."""
        return self.packed.kind in ("f32", "bf16", "f16", "int8") and not self._is_quantized and self.has_matrix_unit()

    def use_matrix_unit(self, num_rows: int | None) -> None:
        """Use the matrix unit for batches of at least ``num_rows`` rows; None disables it."""
        self.packed.set_matrix_rows(num_rows)

    def read(self) -> None:
        """Read the weight once with all threads and do nothing with it, to measure how long that takes."""
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
    """Make the numbers of each row contiguous, as the core reads them; rows themselves may lie apart."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def core_activation(activation: Activation) -> CoreActivation | None:
    """The core's name of an activation that it can apply to a product; None if it cannot."""
    return _CORE_ACTIVATIONS.get(activation)


class LinearByRows:
    """Computes with one of several kernels, depending on the number of rows; see ``LinearKernel``.

    Args:
        kernels: One for each of ``ROW_CLASSES``.
    """

    def __init__(self, kernels: Sequence[LinearKernel]) -> None:
        if len(kernels) != NUM_ROW_CLASSES:
            raise ValueError(f"{len(kernels)} kernels were given for {NUM_ROW_CLASSES} classes of rows")
        self._kernels = tuple(kernels)
        self.nbytes = sum(kernel.nbytes for kernel in {id(kernel): kernel for kernel in kernels}.values())

    def unpack(self, num_outputs: int, first: int = 0) -> Tensor:
        """See ``UnpackingKernel``; all copies have the same numbers."""
        kernel = next(kernel for kernel in self._kernels if isinstance(kernel, UnpackingKernel))
        return kernel.unpack(num_outputs, first)

    def forward(self, x: Tensor, activation: Activation | None, residual: Tensor | None) -> Tensor:
        """See ``LinearKernel.forward``."""
        num_rows = x.shape[0] if x.dim() == 2 else x[..., 0].numel()
        return self._kernels[row_class(num_rows)].forward(x, activation, residual)

    def kernel_of(self, index: int) -> LinearKernel:
        """The kernel for a class of rows."""
        return self._kernels[index]
