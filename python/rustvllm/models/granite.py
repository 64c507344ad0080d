"""Granite 3 and 4 without experts: Llama with factors on embedding, attention, what layers add, and logits.

The stream is kept divided by ``residual_multiplier``. So layers add their results without a factor, as those of other
models do, and every device's fused additions serve. A norm gives the same if its epsilon is divided by the square.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rustvllm.models.hf_config import HFConfig
from rustvllm.models.llama import LlamaForCausalLM


class GraniteForCausalLM(LlamaForCausalLM):
    """``GraniteForCausalLM`` of a checkpoint.

    Attributes:
        embed_scale: Multiplies the embedding of a token.
    """

    def __init__(self, hf_config: Mapping[str, Any], max_model_len: int) -> None:
        """See ``CausalLM.__init__``."""
        super().__init__(hf_config, max_model_len)
        config = HFConfig(hf_config)
        self.embed_scale = config.positive_float("embedding_multiplier", 1.0) / _residual_multiplier(config)
        self.logit_scale = 1 / config.positive_float("logits_scaling", 1.0)

    def norm_eps(self, config: HFConfig) -> float:
        """See ``RotaryLM.norm_eps``: that of a stream which was divided."""
        return super().norm_eps(config) / _residual_multiplier(config) ** 2

    def attention_scale(self, config: HFConfig) -> float:
        """See ``RotaryAttention``."""
        return config.positive_float("attention_multiplier", 1.0)

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """See ``CausalLM.embed``."""
        return super().embed(input_ids, positions) * self.embed_scale


def _residual_multiplier(config: HFConfig) -> float:
    return config.positive_float("residual_multiplier", 1.0)
