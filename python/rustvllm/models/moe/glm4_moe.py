"""GLM-4.5 and 4.6: heads of which a part turns, and experts behind sigmoids, next to one for all tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rustvllm.layers.norm import RMSNorm
from rustvllm.models.decoder.rotary_attention import HeadSizes, RotaryAttention
from rustvllm.models.decoder.rotary_lm import PreNormLayer, RotaryLM
from rustvllm.models.hf_config import HFConfig
from rustvllm.models.moe.grouped_experts import grouped_mlps

_LAYER = re.compile(r"(?:layers|blk)\.(\d+)\.")
"""Of a checkpoint, or of what only GGUF files have."""


class Glm4MoeForCausalLM(RotaryLM):
    """``Glm4MoeForCausalLM`` of a checkpoint."""

    partial_rotary = True

    def __init__(self, hf_config: Mapping[str, Any], max_model_len: int) -> None:
        """See ``CausalLM.__init__``; half of each head turns if the configuration does not say how much."""
        super().__init__({"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, **hf_config}, max_model_len)
        config = HFConfig(hf_config)
        first = config.positive_int("num_hidden_layers")
        # Of further layers, which predict more than one token, and which nothing here runs.
        self._unused_layers = range(first, first + config.index("num_nextn_predict_layers", 0))

    def layer_maker(self, config: HFConfig, sizes: HeadSizes, num_layers: int) -> Callable[[int], PreNormLayer]:
        """Layers without a bias in the output projection, with norms of heads if ``use_qk_norm`` says so."""
        eps = config.positive_float("rms_norm_eps", 1e-5)
        bias = config.boolean("attention_bias", default=False)
        has_norms = config.boolean("use_qk_norm", default=False)
        head_norm = partial(RMSNorm, sizes.head_dim, eps) if has_norms else None
        make_mlp = grouped_mlps(config, sizes.hidden_size, num_layers, first_sparse=1, is_normed=True)
        return lambda layer: PreNormLayer(
            eps, RotaryAttention(sizes, qkv_bias=bias, head_norm=head_norm), make_mlp(layer)
        )

    def is_ignored(self, name: str) -> bool:
        """See ``CausalLM.is_ignored``: layers that predict further tokens are not used."""
        match = _LAYER.match(name)
        return super().is_ignored(name) or (match is not None and int(match[1]) in self._unused_layers)
