"""Qwen3's mixture of experts: Qwen3's attention, and experts in all layers or in some of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rustvllm.layers.norm import RMSNorm
from rustvllm.layers.router import Routing
from rustvllm.models.decoder.expert_mlp import ExpertMLP, ExpertSizes
from rustvllm.models.decoder.gated_mlp import GatedMLP
from rustvllm.models.decoder.rotary_attention import HeadSizes, RotaryAttention
from rustvllm.models.decoder.rotary_lm import PreNormLayer, RotaryLM
from rustvllm.models.hf_config import HFConfig


class Qwen3MoeForCausalLM(RotaryLM):
    """``Qwen3MoeForCausalLM`` of a checkpoint."""

    def layer_maker(self, config: HFConfig, sizes: HeadSizes, num_layers: int) -> Callable[[int], PreNormLayer]:
        """Every ``decoder_sparse_step``-th layer has experts, but for those that ``mlp_only_layers`` names.

        If there is a window, every layer has it.
        """
        eps = config.positive_float("rms_norm_eps", 1e-6)
        bias = config.boolean("attention_bias", default=False)
        act = config.string("hidden_act", "silu")
        slides = config.boolean("use_sliding_window", default=False)
        window = config.sliding_window(4096) if slides else None
        step, dense = config.positive_int("decoder_sparse_step", default=1), config.layer_numbers("mlp_only_layers")
        sparse = {layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0}
        make_experts: Callable[[], ExpertMLP] | None = None
        if sparse:
            experts = ExpertSizes.from_config(config, sizes.hidden_size, inner="moe_intermediate_size")
            routing = Routing(is_normed=config.boolean("norm_topk_prob", default=False))
            make_experts = partial(ExpertMLP, experts, act, routing)
        inner_size = config.positive_int("intermediate_size") if len(sparse) < num_layers else 0

        def make_mlp(layer: int) -> GatedMLP | ExpertMLP:
            if make_experts is not None and layer in sparse:
                return make_experts()
            return GatedMLP(sizes.hidden_size, inner_size, act)

        return lambda layer: PreNormLayer(
            eps,
            RotaryAttention(
                sizes,
                qkv_bias=bias,
                out_bias=bias,
                sliding_window=window,
                head_norm=partial(RMSNorm, sizes.head_dim, eps),
            ),
            make_mlp(layer),
        )
