"""The architectures that have a model of their own here, as plain data: their names, and what they leave unsaid."""

from collections.abc import Mapping
from typing import Any, Final

MODEL_TYPES: Final[Mapping[str, str]] = {
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "opt": "OPTForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""``model_type`` → the class that it stands for when ``architectures`` names none."""
SUPPORTED_ARCHITECTURES: Final = tuple(sorted(MODEL_TYPES.values()))
"""What ``models/registry`` has, as a list that needs no torch; a test keeps the two equal."""
MULTI_HEAD: Final = frozenset({"GPT2LMHeadModel", "GPTNeoXForCausalLM", "OPTForCausalLM"})
"""Architectures in which every query head has keys and values of its own, whatever the configuration says besides."""
HEAD_DIMS: Final[Mapping[str, int]] = {
    "Gemma2ForCausalLM": 256,
    "Gemma3ForCausalLM": 256,
    "Gemma3ForConditionalGeneration": 256,
    "Qwen3ForCausalLM": 128,
}
"""Width of a head where ``config.json`` has no ``head_dim``, if it is not ``hidden_size / num_attention_heads``."""
_GEMMA3_TEXT: Final[Mapping[str, Any]] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}
"""What a nested ``text_config`` leaves out when it is the default."""


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the text model: of one that also takes pictures, ``text_config`` with what stands beside it.

    Args:
        config: ``config.json``, parsed.
    """
    named = config.get("architectures")
    names = named if isinstance(named, list) else [MODEL_TYPES.get(str(config.get("model_type")))]
    text = config.get("text_config")
    if "Gemma3ForConditionalGeneration" not in names or not isinstance(text, Mapping):
        return dict(config)
    beside = {key: value for key, value in config.items() if key not in ("text_config", "vision_config")}
    return {**_GEMMA3_TEXT, **text, **beside}
