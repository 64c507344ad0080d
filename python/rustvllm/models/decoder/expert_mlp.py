"""The MLP of mixture-of-experts models: a router chooses a few of many gated MLPs for each token.

One more gated MLP may compute every token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rustvllm.exceptions import ModelLoadError
from rustvllm.layers.activation import Activation, apply_gated
from rustvllm.layers.decoder import ExpertMLPParts, SharedMLPParts
from rustvllm.layers.linear import Linear
from rustvllm.layers.router import Router, Routing
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
        cls,
        config: HFConfig,
        hidden_size: int,
        *,
        inner: str,
        experts: tuple[int, int] | None = None,
        names: tuple[str, ...] = ("num_local_experts", "num_experts"),
    ) -> ExpertSizes:
        """Read the sizes.

        Args:
            config: The model's configuration.
            hidden_size: Width of the residual stream.
            inner: The key of ``inner_size``.
            experts: The number of experts and how many are chosen, where the configuration has none.
            names: Keys of the number of experts; the first that is set counts.

        Raises:
            ModelLoadError: A size is missing, or more experts are chosen than there are.
        """
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


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The gated MLP next to the experts, which computes every token.

    Attributes:
        name: Its name in checkpoints.
        inner_size: Width of its gates and of its features.
        has_gate: Whether the sigmoid of a product with the stream is the weight of its result; otherwise that is 1. The
            map is called ``name`` with ``_gate`` behind it.
    """

    name: str
    inner_size: int
    has_gate: bool = False


class ExpertMLP(nn.Module):
    """Adds up the results of the experts that the router chooses for a token, each times its weight.

    An expert's product of a token does not depend on other tokens, and a token's results are added in a fixed order, in
    float32: that of the shared expert, then those of its experts in the order of their numbers. So other requests of
    the batch do not change a token's result.

    Args:
        sizes: The experts.
        activation: The gates' activation, or its name in a configuration.
        routing: How the router chooses.
        bias: Whether the router and the experts' layers have biases.
        shared: The MLP that computes every token; None if there is none.
    """

    def __init__(
        self,
        sizes: ExpertSizes,
        activation: str | Activation,
        routing: Routing,
        *,
        bias: bool = False,
        shared: SharedExpert | None = None,
    ) -> None:
        super().__init__()
        self.gate = Router(sizes.hidden_size, sizes.num_experts, sizes.num_chosen, routing, bias=bias)
        self.experts = nn.ModuleList(
            GatedMLP(sizes.hidden_size, sizes.inner_size, activation, bias=bias) for _ in range(sizes.num_experts)
        )
        for module in self.experts.modules():
            if isinstance(module, Linear):
                module.takes_adapters, module.is_grouped = False, True
        self._shared = shared
        if shared is not None:
            self.add_module(shared.name, GatedMLP(sizes.hidden_size, shared.inner_size, activation, bias=bias))
        if shared is not None and shared.has_gate:
            gate = Linear(sizes.hidden_size, 1, bias=False)
            gate.keeps_numbers, gate.takes_adapters = True, False
            self.add_module(f"{shared.name}_gate", gate)

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        """Apply the MLP; ``residual`` is added, and may be overwritten."""
        weights, ids = self.gate.choose(self.gate.logits(hidden))
        first = self._expert(0)
        total = self._shared_result(hidden)
        for number in sorted(set(ids.flatten().tolist())):
            expert = self._expert(number)
            tokens, places = (ids == number).nonzero(as_tuple=True)
            total.index_add_(0, tokens, _own_product(expert, hidden[tokens]) * weights[tokens, places, None])
        if residual is not None and first.down_proj.adds_residual:
            total = residual + total
        return first.down_proj.sum_over_ranks(total.to(hidden.dtype))

    def _shared_result(self, hidden: Tensor) -> Tensor:
        """float32 ``[num_tokens, hidden_size]``: what the shared expert gives on this rank, zeros without one."""
        mlp, gate = self._shared_parts()
        if mlp is None:
            return torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        result = _own_product(mlp, hidden)
        return result if gate is None else result * gate(hidden).to(torch.float32).sigmoid()

    def _shared_parts(self) -> tuple[GatedMLP | None, Linear | None]:
        if self._shared is None:
            return None, None
        mlp, gate = getattr(self, self._shared.name), getattr(self, f"{self._shared.name}_gate", None)
        assert isinstance(mlp, GatedMLP)
        assert gate is None or isinstance(gate, Linear)
        return mlp, gate

    def _expert(self, number: int) -> GatedMLP:
        expert = self.experts[number]
        assert isinstance(expert, GatedMLP)
        return expert

    def outline(self) -> ExpertMLPParts:
        """The parts of ``forward``."""
        experts = (self._expert(number).outline() for number in range(len(self.experts)))
        mlp, gate = self._shared_parts()
        shared = None if mlp is None else SharedMLPParts(mlp.outline(), gate)
        return ExpertMLPParts(self.gate, tuple(experts), shared)


def _own_product(mlp: GatedMLP, hidden: Tensor) -> Tensor:
    """float32: what this rank's part of an MLP gives. The ranks sum once, and not for every expert."""
    inner = apply_gated(mlp.act, mlp.gate_up_proj(hidden))
    return Linear.forward(mlp.down_proj, inner).to(torch.float32)
