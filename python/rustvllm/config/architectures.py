"""The architectures that have a model of their own here, as plain data: names, modules, and what they leave unsaid."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row of :data:`ARCHITECTURES`.

    Attributes:
        name: The model's class, as ``architectures`` in ``config.json`` names it.
        model_type: Stands for the class when ``architectures`` names none.
        module: The class's module in ``rustvllm.models``.
        head_dim: Width of a head where ``config.json`` has no ``head_dim``; None: ``hidden_size /
            num_attention_heads``.
        is_multi_head: Every query head has keys and values of its own, whatever the configuration says besides.
        is_cpu_only: On other devices transformers' code runs it.
    """

    name: str
    model_type: str
    module: str
    head_dim: int | None = None
    is_multi_head: bool = False
    is_cpu_only: bool = False


ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    row.name: row
    for row in (
        Architecture("Dots1ForCausalLM", "dots1", "moe.dots1", is_cpu_only=True),
        Architecture("GPT2LMHeadModel", "gpt2", "gpt2", is_multi_head=True),
        Architecture("GPTNeoXForCausalLM", "gpt_neox", "gpt_neox", is_multi_head=True),
        Architecture("Gemma2ForCausalLM", "gemma2", "gemma2", head_dim=256),
        Architecture("Gemma3ForCausalLM", "gemma3_text", "gemma3", head_dim=256),
        Architecture("Gemma3ForConditionalGeneration", "gemma3", "gemma3", head_dim=256),
        Architecture("Glm4MoeForCausalLM", "glm4_moe", "moe.glm4_moe", is_cpu_only=True),
        Architecture("GptOssForCausalLM", "gpt_oss", "moe.gpt_oss", head_dim=64, is_cpu_only=True),
        Architecture("GraniteForCausalLM", "granite", "granite"),
        Architecture("Idefics3ForConditionalGeneration", "idefics3", "vision.idefics3"),
        Architecture("LlamaForCausalLM", "llama", "llama"),
        Architecture("LlavaForConditionalGeneration", "llava", "vision.llava"),
        Architecture("MistralForCausalLM", "mistral", "mistral"),
        Architecture("MixtralForCausalLM", "mixtral", "moe.mixtral", is_cpu_only=True),
        Architecture("OPTForCausalLM", "opt", "opt", is_multi_head=True),
        Architecture("Olmo2ForCausalLM", "olmo2", "olmo2"),
        Architecture("Olmo3ForCausalLM", "olmo3", "olmo2"),
        Architecture("Phi3ForCausalLM", "phi3", "phi3"),
        Architecture("Qwen2ForCausalLM", "qwen2", "qwen2"),
        Architecture("Qwen2MoeForCausalLM", "qwen2_moe", "moe.qwen2_moe", is_cpu_only=True),
        Architecture("Qwen2VLForConditionalGeneration", "qwen2_vl", "vision.qwen2_vl"),
        Architecture("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", "vision.qwen2_vl"),
        Architecture("Qwen3ForCausalLM", "qwen3", "qwen3", head_dim=128),
        Architecture("Qwen3MoeForCausalLM", "qwen3_moe", "moe.qwen3_moe", is_cpu_only=True),
        Architecture("Qwen3VLForConditionalGeneration", "qwen3_vl", "vision.qwen3_vl", head_dim=128),
        Architecture("SmolLM3ForCausalLM", "smollm3", "llama"),
        Architecture("SmolVLMForConditionalGeneration", "smolvlm", "vision.idefics3"),
    )
}
"""By name. ``models/registry`` imports a row's module when a model of it is made; docs/loading.md has the same rows."""
SUPPORTED_ARCHITECTURES: Final = tuple(sorted(ARCHITECTURES))
MODEL_TYPES: Final[Mapping[str, str]] = {row.model_type: row.name for row in ARCHITECTURES.values()}
"""``model_type`` → the class that it stands for."""
MULTI_HEAD: Final = frozenset(row.name for row in ARCHITECTURES.values() if row.is_multi_head)
HEAD_DIMS: Final[Mapping[str, int]] = {row.name: row.head_dim for row in ARCHITECTURES.values() if row.head_dim}
_HEADED: Final = ("ForCausalLM", "LMHeadModel")
BARE_CLASSES: Final[Mapping[str, str]] = {
    **{name.removesuffix(end) + "Model": name for name in ARCHITECTURES for end in _HEADED if name.endswith(end)},
    "Gemma3TextModel": "Gemma3ForCausalLM",
}
"""transformers' class of a decoder without a head → the class with one."""
CLASSIFIER_ENDING: Final = "ForSequenceClassification"
CLASSIFIER_CLASSES: Final[Mapping[str, str]] = {
    **{
        name.removesuffix(end) + CLASSIFIER_ENDING: name
        for name in ARCHITECTURES
        for end in _HEADED
        if name.endswith(end)
    },
    "Gemma3TextForSequenceClassification": "Gemma3ForCausalLM",
}
"""transformers' class of a decoder that classifies → the class with a head."""
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
_LLAMA_TEXT: Final[Mapping[str, Any]] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_QWEN2_VL_TEXT: Final[Mapping[str, Any]] = {
    "vocab_size": 152_064,
    "hidden_size": 8192,
    "intermediate_size": 29_568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
}
_QWEN3_VL_TEXT: Final[Mapping[str, Any]] = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 128_000,
    "rope_theta": 500_000.0,
}
_NESTED_TEXT: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": _LLAMA_TEXT,
    "mistral": {**_LLAMA_TEXT, "intermediate_size": 14_336, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2_vl_text": _QWEN2_VL_TEXT,
    "qwen2_5_vl_text": _QWEN2_VL_TEXT,
    "qwen3_vl_text": _QWEN3_VL_TEXT,
}
"""The same of text models that see images, by their ``model_type``."""
_TEXT_TYPES: Final[Mapping[str, str]] = {
    "Qwen2VLForConditionalGeneration": "qwen2_vl_text",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
    "Qwen3VLForConditionalGeneration": "qwen3_vl_text",
}
"""The ``model_type`` of text models whose configuration may leave it out; of others it is ``llama``."""
_FLAT: Final = frozenset({"Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"})
"""Models whose older configurations have the keys of the text model next to those of the parent."""
_SEEING: Final = frozenset(
    {
        "LlavaForConditionalGeneration",
        "Idefics3ForConditionalGeneration",
        "SmolVLMForConditionalGeneration",
        *_TEXT_TYPES,
    }
)
_OF_PARENT: Final = ("architectures", "model_type", "vision_config", "text_config", "quantization_config")
TEXT_MODEL_TYPE: Final = "text_model_type"
"""Key under which the flat configuration of a model that sees images has the ``model_type`` of its text model."""


def chosen_share(config: Mapping[str, Any]) -> float:
    """The share of a layer's experts that compute a token; 1 for a model without experts.

    Args:
        config: ``config.json``, parsed.
    """
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    count = next((config[name] for name in names if config.get(name) is not None), None)
    chosen = config.get("num_experts_per_tok")
    if not isinstance(count, int) or not isinstance(chosen, int) or not 0 < chosen <= count:
        return 1.0
    return chosen / count


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the text model; of a multimodal one, ``text_config`` and the other keys of its parent.

    Of a model that sees images, the parent's ``text_config`` and ``vision_config`` stay, for its vision tower.

    Args:
        config: ``config.json``, parsed.
    """
    named = config.get("architectures")
    names = named if isinstance(named, list) else [MODEL_TYPES.get(str(config.get("model_type")))]
    text, named_kind = nested_text(config, *(name for name in names if isinstance(name, str)))
    if isinstance(text, Mapping) and _SEEING.intersection(name for name in names if isinstance(name, str)):
        return _text_of_seeing_model(config, text, named_kind)
    if "Gemma3ForConditionalGeneration" not in names or not isinstance(text, Mapping):
        return dict(config)
    return {**_GEMMA3_TEXT, **text, **config}


def nested_text(config: Mapping[str, Any], *names: str) -> tuple[object, str]:
    """The configuration of a text model within its parent's, and its ``model_type`` if it does not say.

    Older configurations of some models have the same keys without ``text_config``.

    Args:
        config: ``config.json``, parsed.
        names: The classes of the model.
    """
    text = config.get("text_config")
    if text is None and not _FLAT.isdisjoint(names):
        text = {key: value for key, value in config.items() if key not in _OF_PARENT}
    default = "gemma3_text" if "Gemma3ForConditionalGeneration" in names else "llama"
    return text, next((_TEXT_TYPES[name] for name in names if name in _TEXT_TYPES), default)


def _text_of_seeing_model(config: Mapping[str, Any], text: Mapping[str, Any], default_kind: str) -> dict[str, Any]:
    kind = text.get("model_type", default_kind)
    parents = {key: config[key] for key in ("architectures", "model_type", "dtype", "torch_dtype") if key in config}
    is_tied = text.get("tie_word_embeddings") is True or config.get("tie_word_embeddings") is True
    defaults = _NESTED_TEXT.get(kind, {}) if isinstance(kind, str) else {}
    flat = {**defaults, **config, **text, **parents, "tie_word_embeddings": is_tied, TEXT_MODEL_TYPE: kind}
    for name in ("rope_scaling", "rope_parameters"):
        # Positions of three parts do not scale them: the model's class says that it has them.
        scaling = flat.get(name)
        if isinstance(scaling, Mapping) and "mrope" in (scaling.get("rope_type"), scaling.get("type")):
            flat[name] = {**scaling, "rope_type": "default", "type": "default"}
    return {**flat, "text_config": text}
