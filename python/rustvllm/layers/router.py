"""Chooses the experts of each token, by the products of a small dense layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rustvllm.layers.linear import Linear, WideRowsKernel

_LEAST_SUM = 1e-20
"""Chosen weights are divided by their sum, or by this if they add up to less, so that zeros stay zeros."""


@dataclass(frozen=True, slots=True)
class Routing:
    """What a router's logits mean.

    Attributes:
        is_normed: Whether the weights of a token's experts are divided by their sum.
        scores: What experts are chosen by and their weights are made of: a softmax over the logits of all experts, or
            the sigmoid of each logit.
        has_choice_bias: Whether a stored number of each expert is added to its score when experts are chosen. It is not
            added to the weights.
        num_groups: Groups of neighbouring experts; it divides their number.
        num_chosen_groups: How many groups a token's experts may come from: those whose two largest scores have the
            largest sums.
        scale: Factor on the weights.
        is_wide: Whether the router's products are float32 in a model of fewer bits, because small differences choose.
    """

    is_normed: bool
    scores: Literal["softmax", "sigmoid"] = "softmax"
    has_choice_bias: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    scale: float = 1.0
    is_wide: bool = False


class Router(Linear):
    """A dense layer that gives each expert a logit, by which a token's experts are chosen.

    A packed copy keeps the numbers of its weight whatever other layers are rounded to, because a small error would
    choose other experts. Every rank has the whole layer, so that all choose the same.

    Args:
        in_features: Width of the residual stream.
        num_experts: The number of experts.
        num_chosen: How many of them compute each token.
        routing: What the logits mean.
        bias: Whether there is a bias.

    Attributes:
        e_score_correction_bias: float32 ``[num_experts]``, added to the scores when experts are chosen; None if nothing
            is.
    """

    keeps_numbers = True
    takes_adapters = False

    def __init__(
        self, in_features: int, num_experts: int, num_chosen: int, routing: Routing, *, bias: bool = False
    ) -> None:
        super().__init__(in_features, num_experts, bias=bias)
        self.num_chosen = num_chosen
        self.routing = routing
        # In float32 whatever the model has: differences of scores are smaller than the steps of 16 bits near 1.
        self.e_score_correction_bias = (
            nn.Parameter(torch.empty(num_experts, dtype=torch.float32), requires_grad=False)
            if routing.has_choice_bias
            else None
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """The layer's outputs, ``[num_tokens, num_experts]``, in float32 if ``routing.is_wide``."""
        if not self.routing.is_wide or hidden.dtype == torch.float32:
            out: Tensor = self(hidden)
            return out
        wide, kernel = hidden.to(torch.float32), self.kernel
        if kernel is not None and isinstance(kernel, WideRowsKernel):
            return kernel.forward(wide, None, None)
        bias = None if self.bias is None else self.bias.to(torch.float32)
        return F.linear(wide, self.weight_rows(self.weight.shape[0]), bias)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each token and their weights.

        Of experts with equal scores, the first ones are chosen.

        Args:
            logits: ``[num_tokens, num_experts]``, the layer's outputs.

        Returns:
            float32 ``[num_tokens, num_chosen]``, the weights, as ``routing`` says; and int64 ``[num_tokens,
            num_chosen]``, the experts' numbers, those that come first in the choice first.
        """
        routing, wide = self.routing, logits.to(torch.float32)
        scores = wide.softmax(-1) if routing.scores == "softmax" else wide.sigmoid()
        # A softmax keeps the order of logits, but rounds small ones to the same number.
        is_plain = routing.scores == "softmax" and routing.num_groups == 1
        keys = wide if is_plain and self.e_score_correction_bias is None else scores
        if self.e_score_correction_bias is not None:
            keys = scores + self.e_score_correction_bias
        if routing.num_chosen_groups < routing.num_groups:
            keys = self._of_chosen_groups(keys)
        ids = keys.sort(dim=-1, descending=True, stable=True).indices[:, : self.num_chosen]
        weights = scores.gather(1, ids)
        if routing.is_normed:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(_LEAST_SUM)
        return weights * routing.scale if routing.scale != 1.0 else weights, ids

    def _of_chosen_groups(self, keys: Tensor) -> Tensor:
        """The keys, with minus infinity for the experts of groups that are not chosen."""
        grouped = keys.reshape(keys.shape[0], self.routing.num_groups, -1)
        sums = grouped.topk(2, dim=-1).values.sum(-1)
        chosen = sums.sort(dim=-1, descending=True, stable=True).indices[:, : self.routing.num_chosen_groups]
        is_chosen = torch.zeros_like(sums, dtype=torch.bool).scatter_(1, chosen, value=True)
        return grouped.masked_fill(~is_chosen[..., None], float("-inf")).flatten(-2)
