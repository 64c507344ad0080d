"""Qwen2's mixture of experts: Qwen2's attention, and experts next to one for all tokens, in all layers or in some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from rustvllm.exceptions import ModelLoadError
from rustvllm.layers.router import Routing
from rustvllm.models.decoder.expert_mlp import ExpertMLP, ExpertSizes, SharedExpert
from rustvllm.models.decoder.gated_mlp import GatedMLP
from rustvllm.models.decoder.rotary_attention import HeadSizes, RotaryAttention
from rustvllm.models.decoder.rotary_lm import PreNormLayer, RotaryLM
from rustvllm.models.hf_config import FULL_ATTENTION, SLIDING_ATTENTION, HFConfig


class Qwen2MoeForCausalLM(RotaryLM):
    """``Qwen2MoeForCausalLM`` of a checkpoint."""

    def layer_maker(self, config: HFConfig, sizes: HeadSizes, num_layers: int) -> Callable[[int], PreNormLayer]:
        """Layers without a bias in the output projection; see ``qwen_mlps`` for those with experts."""
        eps = config.positive_float("rms_norm_eps", 1e-6)
        bias = config.boolean("qkv_bias", default=True)
        windows = _windows(config, num_layers)

        def shared() -> SharedExpert:
            return SharedExpert("shared_expert", config.positive_int("shared_expert_intermediate_size"), has_gate=True)

        make_mlp = qwen_mlps(config, sizes, num_layers, shared)
        return lambda layer: PreNormLayer(
            eps, RotaryAttention(sizes, qkv_bias=bias, sliding_window=windows[layer]), make_mlp(layer)
        )


def qwen_mlps(
    config: HFConfig, sizes: HeadSizes, num_layers: int, shared: Callable[[], SharedExpert] | None = None
) -> Callable[[int], GatedMLP | ExpertMLP]:
    """Makes each layer's MLP: with experts in every ``decoder_sparse_step``-th, but for those of ``mlp_only_layers``.

    Args:
        config: The model's configuration.
        sizes: With the width of the stream.
        num_layers: The number of layers.
        shared: Reads the expert for all tokens; None if there is none.

    Raises:
        ModelLoadError: The configuration lacks a key that these layers need.
    """
    act = config.string("hidden_act", "silu")
    step, dense = config.positive_int("decoder_sparse_step", default=1), config.layer_numbers("mlp_only_layers")
    sparse = {layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0}
    make_experts: Callable[[], ExpertMLP] | None = None
    if sparse:
        experts = ExpertSizes.from_config(config, sizes.hidden_size, inner="moe_intermediate_size")
        routing = Routing(is_normed=config.boolean("norm_topk_prob", default=False))
        make_experts = partial(ExpertMLP, experts, act, routing, shared=None if shared is None else shared())
    inner_size = config.positive_int("intermediate_size") if len(sparse) < num_layers else 0

    def make_mlp(layer: int) -> GatedMLP | ExpertMLP:
        if make_experts is not None and layer in sparse:
            return make_experts()
        return GatedMLP(sizes.hidden_size, inner_size, act)

    return make_mlp


def _windows(config: HFConfig, num_layers: int) -> Sequence[int | None]:
    """Each layer's window: in every second of the first ``max_window_layers``, if ``use_sliding_window`` says so.

    Without it, ``sliding_window`` means nothing, and may be 0.
    """
    slides = config.boolean("use_sliding_window", default=False)
    first = config.index("max_window_layers", default=28)
    types = config.layer_types(
        num_layers,
        lambda layer: SLIDING_ATTENTION if slides and layer < first and layer % 2 == 0 else FULL_ATTENTION,
    )
    if slides:
        return config.windows(types, 4096)
    if SLIDING_ATTENTION in types:
        raise ModelLoadError(
            f"config.json: 'layer_types' has {SLIDING_ATTENTION!r}, but 'use_sliding_window' is not true; set both or "
            "none of them"
        )
    return [None] * num_layers
