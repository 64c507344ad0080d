"""gpt-oss: attention with sinks and a window in every second layer, and clamped experts with biases in all layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from rustvllm.config.architectures import HEAD_DIMS
from rustvllm.exceptions import ModelLoadError
from rustvllm.layers.activation import clamped_silu
from rustvllm.layers.router import Routing
from rustvllm.models.decoder.expert_mlp import ExpertMLP, ExpertSizes
from rustvllm.models.decoder.rotary_attention import HeadSizes, RotaryAttention
from rustvllm.models.decoder.rotary_lm import PreNormLayer, RotaryLM
from rustvllm.models.hf_config import FULL_ATTENTION, SLIDING_ATTENTION, HFConfig

_YARN: Final[Mapping[str, Any]] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_WINDOW: Final = 128


class GptOssForCausalLM(RotaryLM):
    """``GptOssForCausalLM`` of a checkpoint."""

    default_head_dim = HEAD_DIMS["GptOssForCausalLM"]

    def __init__(self, hf_config: Mapping[str, Any], max_model_len: int) -> None:
        """See ``CausalLM.__init__``; a configuration without rope settings has those of the published models."""
        has_rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling")
        rope = {} if has_rope else {"rope_scaling": dict(_YARN)}
        super().__init__({"rope_theta": 150_000.0, "rms_norm_eps": 1e-5, **hf_config, **rope}, max_model_len)

    def layer_maker(self, config: HFConfig, sizes: HeadSizes, num_layers: int) -> Callable[[int], PreNormLayer]:
        """A window in layers 0, 2, …, unless ``layer_types`` names others."""
        config.refuse_unless("hidden_act", "silu")
        config.refuse_unless("swiglu_alpha", 1.702)
        config.refuse_unless("swiglu_limit", 7.0)
        eps = config.positive_float("rms_norm_eps", 1e-5)
        bias = config.boolean("attention_bias", default=True)
        types = config.layer_types(num_layers, lambda layer: FULL_ATTENTION if layer % 2 else SLIDING_ATTENTION)
        windows = config.windows(types, _WINDOW)
        experts = ExpertSizes.from_config(config, sizes.hidden_size, inner="intermediate_size")
        return lambda layer: PreNormLayer(
            eps,
            RotaryAttention(sizes, qkv_bias=bias, out_bias=bias, sliding_window=windows[layer], has_sinks=True),
            ExpertMLP(experts, clamped_silu, Routing(is_normed=True), bias=True),
        )

    def checkpoint_name(self, name: str) -> str:
        """See ``CausalLM.checkpoint_name``: what other mixtures call the gate is the router here."""
        return name.replace(".mlp.router.", ".mlp.gate.")

    def check_filled(self) -> None:
        """See ``CausalLM.check_filled``: sinks must be finite, or they leave no other share of a softmax."""
        for number, layer in self.layers.named_children():
            sinks = layer.self_attn.sinks if isinstance(layer, PreNormLayer) else None
            if sinks is not None and not bool(sinks.isfinite().all()):
                raise ModelLoadError(
                    f"the tensor model.layers.{number}.self_attn.sinks has a number that is not finite; the checkpoint "
                    "is damaged, download it again"
                )
