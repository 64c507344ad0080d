"""What the flags and the environment ask of dense layers on the CPU, and the kernels that are made so."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rustvllm import _core
from rustvllm.config.checkpoint.whole_forms import NumberForm
from rustvllm.layers.cpu.linear import CoreLinear, OneDnnLinear, TorchLinear, WeightKind, kind_of
from rustvllm.layers.linear import LinearKernel

MOST_INPUTS = 1 << 24
"""The most inputs that a layer can have."""


@dataclass(frozen=True, slots=True)
class LinearOptions:
    """What the flags and the environment ask for.

    Attributes:
        kernel: ``torch``, ``onednn`` or ``core`` for every layer; None: whichever is fastest.
        kind: The number format of packed weights; None keeps the model's. With a format, the core computes.
        group_size: How many inputs share a scale, with int8 and int4; None: all of an output's.
        round_activations: Whether activations are rounded to 8 bits for weights of 8 and 4 bits.
        matrix_unit: Whether the processor's matrix unit may compute where it is faster; a row's bits then depend on the
            number of rows.
    """

    kernel: str | None = None
    kind: WeightKind | None = None
    group_size: int | None = None
    matrix_unit: bool = True
    round_activations: bool = False

    @property
    def form(self) -> NumberForm | None:
        """The form that every layer is rounded to; None keeps the model's numbers."""
        if self.kind not in ("int8", "int4"):
            return None
        if self.group_size is None:  # there are so few scales that their size does not matter
            return NumberForm(MOST_INPUTS, 8, "f32") if self.kind == "int8" else NumberForm(MOST_INPUTS, 4, "f16")
        form = NumberForm(self.group_size, 8 if self.kind == "int8" else 4, "f16")
        return form.as_multiplied(MOST_INPUTS, round_activations=self.round_activations)

    @property
    def packed_kind(self) -> WeightKind | None:
        """The format of packed layers that are not stored as integers; None keeps their numbers."""
        form = self.form
        return self.kind if form is None else kind_of(form.bits, round_activations=self.round_activations)


def make_kernel(
    name: str, threads: _core.CpuThreads, options: LinearOptions, weight: Tensor, bias: Tensor | None
) -> LinearKernel:
    """Pack a weight, or a part of one, for a kernel.

    Args:
        name: ``core``, ``onednn`` or ``torch``; the last computes with the weight as it is.
        threads: The threads for the core's products.
        options: The core rounds the weight as these ask.
        weight: ``[out_features, in_features]``.
        bias: ``[out_features]``.
    """
    if name == "core":
        scales = None if options.form is None else options.form.scales
        return CoreLinear(threads, weight, bias, options.packed_kind, options.group_size, scales=scales)
    if name == "onednn":
        return OneDnnLinear(weight, bias)
    return TorchLinear(weight, bias)
