"""Qwen3-VL, the text model: Qwen3 with positions of three parts. ``vision_tower`` has the part that sees.

That gives each token of an image an embedding, and what the first layers add to the stream behind them (deepstack).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rustvllm.layers.rotary import rope_parameters, section_axes
from rustvllm.models.qwen3 import Qwen3ForCausalLM


class Qwen3VLForConditionalGeneration(Qwen3ForCausalLM):
    """The text model of a ``Qwen3VLForConditionalGeneration`` checkpoint.

    Attributes:
        default_sections: Used if a configuration has no ``mrope_section``.
    """

    prefixes: tuple[str, ...] = ("model.language_model.", "language_model.", "model.")
    default_sections: ClassVar[tuple[int, ...]] = (24, 20, 20)

    def __init__(self, hf_config: Mapping[str, Any], max_model_len: int) -> None:
        """See ``CausalLM.__init__``."""
        super().__init__(hf_config, max_model_len)
        sections = rope_parameters(hf_config).get("mrope_section", self.default_sections)
        self.rotary.axes = section_axes(sections, self.rotary.inv_freq.shape[0], interleaved=True)

    def is_ignored(self, name: str) -> bool:
        """Whether the tensor belongs to the vision tower, or is one that Qwen3 ignores."""
        return name.startswith("visual.") or super().is_ignored(name)
