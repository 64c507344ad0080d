"""The gated MLP: ``down(act(gate(x)) · up(x))``."""

from __future__ import annotations

from torch import Tensor, nn

from rustvllm.layers.activation import apply_gated, get_activation
from rustvllm.layers.linear import Linear
from rustvllm.models.interface import linear_parts


class GatedMLP(nn.Module):
    """See the module. Gate and up are one projection.

    Args:
        hidden_size: Width of the residual stream.
        inner_size: Width of gate and of up.
        activation: Name of the gate's function.
        bias: Whether the maps have biases.
        stored_fused: Whether checkpoints store the one projection (``gate_up_proj``) or its two parts.
    """

    def __init__(
        self, hidden_size: int, inner_size: int, activation: str, *, bias: bool = False, stored_fused: bool = False
    ) -> None:
        super().__init__()
        self.inner_size = inner_size
        self.stored_fused = stored_fused
        self.gate_up_proj = Linear(hidden_size, 2 * inner_size, bias=bias)
        self.act = get_activation(activation)
        self.down_proj = Linear(inner_size, hidden_size, bias=bias)

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        out: Tensor = self.down_proj(apply_gated(self.act, self.gate_up_proj(hidden)), residual=residual)
        return out

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Names within the layer; see ``CausalLM.checkpoint_tensors``."""
        size = self.inner_size
        parts = {"gate_up_proj": 2 * size} if self.stored_fused else {"gate_proj": size, "up_proj": size}
        return linear_parts(self.gate_up_proj, parts) | linear_parts(
            self.down_proj, {"down_proj": self.down_proj.weight.shape[0]}
        )
