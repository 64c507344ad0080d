"""The MLP of mixture-of-experts models: a router chooses a few of many gated MLPs for each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rustvllm.exceptions import ModelLoadError
from rustvllm.layers.activation import Activation, apply_gated
from rustvllm.layers.decoder import ExpertMLPParts
from rustvllm.layers.linear import Linear
from rustvllm.layers.router import Router
from rustvllm.models.decoder.gated_mlp import GatedMLP
from rustvllm.models.hf_config import HFConfig


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """The sizes of the experts of a layer.

    Attributes:
        hidden_size: Width of the residual stream.
        inner_size: Width of an expert's gate and of its ``up``.
        num_experts: The number of experts.
        num_chosen: How many of them compute each token.
    """

    hidden_size: int
    inner_size: int
    num_experts: int
    num_chosen: int

    @classmethod
    def from_config(
        cls, config: HFConfig, hidden_size: int, *, inner: str, experts: tuple[int, int] | None = None
    ) -> ExpertSizes:
        """Read the sizes; the number of experts is ``num_local_experts`` or ``num_experts``.

        Args:
            config: The model's configuration.
            hidden_size: Width of the residual stream.
            inner: The key of ``inner_size``.
            experts: The number of experts and how many are chosen, where the configuration has none.

        Raises:
            ModelLoadError: A size is missing, or more experts are chosen than there are.
        """
        names = "num_local_experts", "num_experts"
        if experts is None:
            num_experts, num_chosen = config.positive_int(*names), config.positive_int("num_experts_per_tok")
        else:
            num_experts = config.positive_int(*names, default=experts[0])
            num_chosen = config.positive_int("num_experts_per_tok", default=experts[1])
        if num_chosen > num_experts:
            raise ModelLoadError(
                f"config.json: num_experts_per_tok ({num_chosen}) must be at most the number of experts ({num_experts})"
            )
        return cls(hidden_size, config.positive_int(inner), num_experts, num_chosen)


class ExpertMLP(nn.Module):
    """Adds up the results of the experts that the router chooses for a token, each times its weight.

    An expert's product of a token does not depend on other tokens, and a token's experts are added in the order of
    their numbers, in float32. So other requests of the batch do not change a token's result.

    Args:
        sizes: The experts.
        activation: The gate's activation, or its name in a configuration.
        is_normed: Whether the weights of a token's experts are divided by their sum.
        bias: Whether the router and the experts' layers have biases.
    """

    def __init__(
        self, sizes: ExpertSizes, activation: str | Activation, *, is_normed: bool, bias: bool = False
    ) -> None:
        super().__init__()
        self.gate = Router(sizes.hidden_size, sizes.num_experts, sizes.num_chosen, is_normed=is_normed, bias=bias)
        self.experts = nn.ModuleList(
            GatedMLP(sizes.hidden_size, sizes.inner_size, activation, bias=bias) for _ in range(sizes.num_experts)
        )
        for module in self.experts.modules():
            if isinstance(module, Linear):
                module.takes_adapters, module.is_grouped = False, True

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        """Apply the MLP; ``residual`` is added, and may be overwritten."""
        weights, ids = self.gate.choose(self.gate(hidden))
        first = self._expert(0)
        total = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        for number in sorted(set(ids.flatten().tolist())):
            expert = self._expert(number)
            tokens, places = (ids == number).nonzero(as_tuple=True)
            inner = apply_gated(expert.act, expert.gate_up_proj(hidden[tokens]))
            # Each rank adds up its own products, so that the ranks sum once and not for every expert.
            out = Linear.forward(expert.down_proj, inner).to(torch.float32)
            total.index_add_(0, tokens, out * weights[tokens, places, None])
        if residual is not None and first.down_proj.adds_residual:
            total = residual + total
        return first.down_proj.sum_over_ranks(total.to(hidden.dtype))

    def _expert(self, number: int) -> GatedMLP:
        expert = self.experts[number]
        assert isinstance(expert, GatedMLP)
        return expert

    def outline(self) -> ExpertMLPParts:
        """The parts of ``forward``."""
        experts = (self._expert(number).outline() for number in range(len(self.experts)))
        return ExpertMLPParts(self.gate, tuple(experts), self.gate.num_chosen, is_normed=self.gate.is_normed)
