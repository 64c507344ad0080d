"""dots.llm1: Qwen3's attention, and experts behind sigmoids, next to one for all tokens."""

from __future__ import annotations

from collections.abc import Callable

from rustvllm.models.decoder.rotary_attention import HeadSizes
from rustvllm.models.decoder.rotary_lm import PreNormLayer, RotaryLM
from rustvllm.models.hf_config import FULL_ATTENTION, SLIDING_ATTENTION, HFConfig
from rustvllm.models.moe.grouped_experts import grouped_mlps
from rustvllm.models.qwen3 import qwen3_attention


class Dots1ForCausalLM(RotaryLM):
    """``Dots1ForCausalLM`` of a checkpoint."""

    def layer_maker(self, config: HFConfig, sizes: HeadSizes, num_layers: int) -> Callable[[int], PreNormLayer]:
        """If there is a window, layers from ``max_window_layers`` on have it, unless ``layer_types`` names others."""
        eps = config.positive_float("rms_norm_eps", 1e-6)
        make_attention = qwen3_attention(config, sizes, eps)
        first, has_window = config.index("max_window_layers", 62), config.sliding_window(4096) is not None
        types = config.layer_types(
            num_layers, lambda layer: SLIDING_ATTENTION if has_window and layer >= first else FULL_ATTENTION
        )
        windows = config.windows(types, 4096)
        make_mlp = grouped_mlps(config, sizes.hidden_size, num_layers, first_sparse=0, is_normed=False)
        return lambda layer: PreNormLayer(eps, make_attention(windows[layer]), make_mlp(layer))
