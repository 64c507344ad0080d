"""The MLPs of models that choose experts as DeepSeek-V3 does, read from their configurations.

Experts have sigmoids as scores, a bias that counts only in the choice, and groups of which some are chosen. One more
MLP computes every token. The first layers have no experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rustvllm.exceptions import ModelLoadError
from rustvllm.layers.router import Routing
from rustvllm.models.decoder.expert_mlp import ExpertMLP, ExpertSizes, SharedExpert
from rustvllm.models.decoder.gated_mlp import GatedMLP
from rustvllm.models.hf_config import HFConfig


def grouped_mlps(
    config: HFConfig, hidden_size: int, num_layers: int, *, first_sparse: int, is_normed: bool
) -> Callable[[int], GatedMLP | ExpertMLP]:
    """Makes each layer's MLP.

    Args:
        config: The model's configuration.
        hidden_size: Width of the residual stream.
        num_layers: The number of layers.
        first_sparse: The first layer with experts, if the configuration has no ``first_k_dense_replace``.
        is_normed: Whether the weights of a token's experts are divided by their sum, if it has no ``norm_topk_prob``.

    Raises:
        ModelLoadError: The configuration lacks a key, or its groups do not fit the experts.
    """
    act = config.string("hidden_act", "silu")
    first = config.index("first_k_dense_replace", first_sparse)
    make_experts: Callable[[], ExpertMLP] | None = None
    if first < num_layers:
        names = "n_routed_experts", "num_local_experts"
        sizes = ExpertSizes.from_config(config, hidden_size, inner="moe_intermediate_size", names=names)
        num_shared = config.index("n_shared_experts", 1)
        # Those are one MLP of their widths together, whose results are a sum.
        shared = SharedExpert("shared_experts", num_shared * sizes.inner_size) if num_shared else None
        routing = _routing(config, sizes, is_normed=is_normed)
        make_experts = partial(ExpertMLP, sizes, act, routing, shared=shared)
    inner_size = config.positive_int("intermediate_size") if first else 0

    def make_mlp(layer: int) -> GatedMLP | ExpertMLP:
        if make_experts is not None and layer >= first:
            return make_experts()
        return GatedMLP(hidden_size, inner_size, act)

    return make_mlp


def _routing(config: HFConfig, sizes: ExpertSizes, *, is_normed: bool) -> Routing:
    num_groups, num_chosen = config.positive_int("n_group", default=1), config.positive_int("topk_group", default=1)
    size = sizes.num_experts // num_groups
    if sizes.num_experts % num_groups or (num_groups > 1 and size < 2):
        raise ModelLoadError(
            f"config.json: n_group ({num_groups}) must divide the number of experts ({sizes.num_experts}) into groups "
            "of 2 or more"
        )
    if num_chosen > num_groups:
        raise ModelLoadError(f"config.json: topk_group ({num_chosen}) must be at most n_group ({num_groups})")
    if sizes.num_chosen > size * num_chosen:
        raise ModelLoadError(
            f"config.json: num_experts_per_tok ({sizes.num_chosen}) must be at most {size * num_chosen}, the experts "
            f"of topk_group ({num_chosen}) groups"
        )
    return Routing(
        is_normed=config.boolean("norm_topk_prob", default=is_normed),
        scores="sigmoid",
        has_choice_bias=True,
        num_groups=num_groups,
        num_chosen_groups=num_chosen,
        scale=config.positive_float("routed_scaling_factor", 1.0),
        is_wide=True,
    )
