"""Activation functions under the names that model configurations use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from rustvllm.exceptions import ModelLoadError
from rustvllm.layers.fused import runs_fused

Activation = Callable[[Tensor], Tensor]


def quick_gelu(x: Tensor) -> Tensor:
    """``x · sigmoid(1.702 x)``."""
    return x * torch.sigmoid(1.702 * x)


def relu2(x: Tensor) -> Tensor:
    """``relu(x)²``."""
    return F.relu(x).square()


def clamped_silu(x: Tensor) -> Tensor:
    """gpt-oss's gate: ``x · sigmoid(1.702 x)`` of numbers that are cut at 7; see also ``apply_gated``.

    No configuration names it.
    """
    return quick_gelu(x.clamp(max=GATE_LIMIT))


GATE_LIMIT = 7.0
"""Where gpt-oss cuts gates and features."""
_gelu_tanh = partial(F.gelu, approximate="tanh")

ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_python": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "relu2": relu2,
    "silu": F.silu,
    "swish": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def get_activation(name: str) -> Activation:
    """The function called ``name`` in a model configuration.

    Raises:
        ModelLoadError: An unknown name; the message lists the known ones.
    """
    try:
        return ACTIVATIONS[name]
    except (KeyError, TypeError):
        known = ", ".join(sorted(ACTIVATIONS))
        raise ModelLoadError(f"activation function {name!r} is not supported; supported: {known}") from None


def apply_gated(activation: Activation, x: Tensor) -> Tensor:
    """``activation(gate) · up`` of rows that have the gate's features first and then those of ``up``.

    With ``clamped_silu``, the features of ``up`` are cut at 7 and -7, and 1 is added to them.

    Args:
        activation: A result of ``get_activation``.
        x: ``[num_tokens, 2 · size]``.

    Returns:
        ``[num_tokens, size]``.
    """
    if activation in (F.silu, F.gelu, _gelu_tanh) and runs_fused(x):
        from rustvllm.kernels.activation import gelu_and_mul, silu_and_mul

        if activation is F.silu:
            return silu_and_mul(x)
        return gelu_and_mul(x, approximate="none" if activation is F.gelu else "tanh")
    gate, up = x.chunk(2, dim=-1)
    if activation is clamped_silu:
        up = up.clamp(-GATE_LIMIT, GATE_LIMIT) + 1.0
    return activation(gate) * up
