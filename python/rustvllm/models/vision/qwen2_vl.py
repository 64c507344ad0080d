"""Qwen2-VL and Qwen2.5-VL, the text model: Qwen2 with positions of three parts. ``vision_tower`` has what sees.

A text token's parts are equal, and rotate heads as one part does; the tokens of an image have those of its grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rustvllm.layers.rotary import rope_parameters, section_axes
from rustvllm.models.qwen2 import Qwen2ForCausalLM


class Qwen2VLForConditionalGeneration(Qwen2ForCausalLM):
    """The text model of a ``Qwen2VLForConditionalGeneration`` checkpoint.

    Attributes:
        default_sections: Used if a configuration has no ``mrope_section``.
    """

    prefixes: tuple[str, ...] = ("model.language_model.", "language_model.", "model.")
    default_sections: ClassVar[tuple[int, ...]] = (16, 24, 24)

    def __init__(self, hf_config: Mapping[str, Any], max_model_len: int) -> None:
        """See ``CausalLM.__init__``."""
        super().__init__(hf_config, max_model_len)
        sections = rope_parameters(hf_config).get("mrope_section", self.default_sections)
        self.rotary.axes = section_axes(sections, self.rotary.inv_freq.shape[0], interleaved=False)

    def is_ignored(self, name: str) -> bool:
        """Whether the tensor belongs to the vision tower, or is one that Qwen2 ignores."""
        return name.startswith("visual.") or super().is_ignored(name)


class Qwen2_5_VLForConditionalGeneration(Qwen2VLForConditionalGeneration):  # noqa: N801 -- transformers' name
    """The text model of a ``Qwen2_5_VLForConditionalGeneration`` checkpoint."""
