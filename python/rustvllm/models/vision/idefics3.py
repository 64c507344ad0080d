"""Idefics3 and SmolVLM, the text model: Llama. ``vision_tower`` has the part that sees."""

from __future__ import annotations

from rustvllm.models.llama import LlamaForCausalLM


class Idefics3ForConditionalGeneration(LlamaForCausalLM):
    """The text model of an ``Idefics3ForConditionalGeneration`` checkpoint."""

    prefixes: tuple[str, ...] = ("model.text_model.", "text_model.", "model.")

    def is_ignored(self, name: str) -> bool:
        """Whether the tensor belongs to the vision tower, or is one that Llama ignores."""
        return name.startswith(("vision_model.", "connector.")) or super().is_ignored(name)


class SmolVLMForConditionalGeneration(Idefics3ForConditionalGeneration):
    """The text model of a ``SmolVLMForConditionalGeneration`` checkpoint."""
