"""The gated MLP: ``down(act(gate(x)) · up(x))``."""

from __future__ import annotations

from torch import Tensor, nn

from rustvllm.layers.activation import Activation, apply_gated, get_activation
from rustvllm.layers.decoder import DenseMLPParts
from rustvllm.layers.parallel import RowLinear, column_linear
from rustvllm.models.interface import linear_parts


class GatedMLP(nn.Module):
    """Computes ``down(act(gate(x)) · up(x))``; gate and up are one projection.

    Args:
        hidden_size: Width of the residual stream.
        inner_size: Width of gate and of up.
        activation: The gate's activation, or its name in a configuration.
        bias: Whether the projections have biases.
        stored_fused: Whether checkpoints store the fused projection (``gate_up_proj``) or its two parts.
    """

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        activation: str | Activation,
        *,
        bias: bool = False,
        stored_fused: bool = False,
    ) -> None:
        super().__init__()
        self.stored_fused = stored_fused
        self.gate_up_proj = column_linear(hidden_size, inner_size, inner_size, bias=bias)
        self.act = get_activation(activation) if isinstance(activation, str) else activation
        self.down_proj = RowLinear(inner_size, hidden_size, bias=bias)

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        """Apply the MLP; ``residual`` is added, and may be overwritten."""
        out: Tensor = self.down_proj(apply_gated(self.act, self.gate_up_proj(hidden)), residual=residual, in_place=True)
        return out

    def outline(self) -> DenseMLPParts:
        """The parts of ``forward``."""
        return DenseMLPParts(self.gate_up_proj, self.act, self.down_proj, is_gated=True)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Names within the layer; see ``CausalLM.checkpoint_tensors``."""
        size = self.down_proj.weight.shape[1]
        parts = {"gate_up_proj": 2 * size} if self.stored_fused else {"gate_proj": size, "up_proj": size}
        return linear_parts(self.gate_up_proj, parts) | linear_parts(
            self.down_proj, {"down_proj": self.down_proj.weight.shape[0]}
        )
