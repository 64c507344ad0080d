"""LLaVA 1.5, its text model: Llama or Mistral. ``vision_tower`` has the part that sees."""

from __future__ import annotations

from collections.abc import Callable

from rustvllm.config.architectures import TEXT_MODEL_TYPE
from rustvllm.models.decoder.rotary_attention import HeadSizes
from rustvllm.models.decoder.rotary_lm import PreNormLayer
from rustvllm.models.hf_config import HFConfig
from rustvllm.models.llama import LlamaForCausalLM
from rustvllm.models.mistral import MistralForCausalLM


class LlavaForConditionalGeneration(LlamaForCausalLM, MistralForCausalLM):
    """The text model of a ``LlavaForConditionalGeneration`` checkpoint."""

    prefixes: tuple[str, ...] = ("language_model.model.", "model.language_model.", "language_model.", "model.")

    def layer_maker(self, config: HFConfig, sizes: HeadSizes, num_layers: int) -> Callable[[int], PreNormLayer]:
        """Layers of the text model that ``text_config`` names."""
        is_mistral = config.string(TEXT_MODEL_TYPE, "llama") == "mistral"
        family = MistralForCausalLM if is_mistral else LlamaForCausalLM
        return family.layer_maker(self, config, sizes, num_layers)

    def is_ignored(self, name: str) -> bool:
        """Whether the tensor belongs to the vision tower, or is one that Llama ignores."""
        return name.startswith(("vision_tower.", "multi_modal_projector.")) or super().is_ignored(name)
