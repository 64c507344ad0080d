"""Chooses the experts of each token, by the products of a small dense layer."""

from __future__ import annotations

import torch
from torch import Tensor

from rustvllm.layers.linear import Linear


class Router(Linear):
    """A dense layer that gives each expert a logit; a token's largest ones choose its experts.

    A packed copy keeps the numbers of its weight whatever other layers are rounded to, because a small error would
    choose other experts. Every rank has the whole layer, so that all choose the same.

    Args:
        in_features: Width of the residual stream.
        num_experts: The number of experts.
        num_chosen: How many of them compute each token.
        is_normed: Whether the weights of a token's experts are divided by their sum.
        bias: Whether there is a bias.
    """

    keeps_numbers = True
    takes_adapters = False

    def __init__(
        self, in_features: int, num_experts: int, num_chosen: int, *, is_normed: bool, bias: bool = False
    ) -> None:
        super().__init__(in_features, num_experts, bias=bias)
        self.num_chosen = num_chosen
        self.is_normed = is_normed

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each token and their weights.

        Of experts with equal logits, the first ones are chosen.

        Args:
            logits: ``[num_tokens, num_experts]``, the layer's outputs.

        Returns:
            float32 ``[num_tokens, num_chosen]``, the weights: the softmax over all experts, perhaps normed; and int64
            ``[num_tokens, num_chosen]``, the experts' numbers, those with the largest weights first.
        """
        wide = logits.to(torch.float32)
        ids = wide.sort(dim=-1, descending=True, stable=True).indices[:, : self.num_chosen]
        weights = wide.softmax(-1).gather(1, ids)
        return (weights / weights.sum(-1, keepdim=True) if self.is_normed else weights), ids
