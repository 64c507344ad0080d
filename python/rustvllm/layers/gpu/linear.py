"""Dense layers on a GPU that compute each row independently: see ``rustvllm.kernels.matmul``."""

from __future__ import annotations

from torch import Tensor, nn

from rustvllm.kernels.matmul import linear
from rustvllm.layers.activation import Activation
from rustvllm.layers.gpu.quantized import QuantizedLinear
from rustvllm.layers.linear import Linear


class TritonLinear:
    """A ``LinearKernel`` that computes with the weight itself.

    Args:
        weight: ``[out_features, in_features]``.
        bias: ``[out_features]`` or None.
    """

    nbytes = 0

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def forward(self, x: Tensor, activation: Activation | None, residual: Tensor | None) -> Tensor:
        """See ``Linear.forward``."""
        out = linear(x, self._weight, self._bias)
        if activation is not None:
            out = activation(out)
        return out if residual is None else residual + out


def use_triton(model: nn.Module) -> None:
    """Make every dense layer of a loaded model compute each row independently."""
    for module in model.modules():
        if not isinstance(module, Linear):
            continue
        if isinstance(module.kernel, QuantizedLinear):
            module.kernel.is_invariant = True
        else:
            module.kernel = TritonLinear(module.weight, module.bias)
