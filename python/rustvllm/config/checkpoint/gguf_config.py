"""Turns a GGUF file's metadata into the equivalent ``config.json`` and ``generation_config.json``."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from rustvllm.config.checkpoint.gguf_file import GgufFile
from rustvllm.exceptions import ModelLoadError

_ROPE_TYPES: Final = ("none", "linear", "yarn", "longrope")
_SAMPLING: Final[Mapping[str, str]] = {
    # key behind general.sampling. -> name in generation_config.json
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_END_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_NAMES: Final = frozenset(
    ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
)
"""Control tokens that end a turn in addition to the file's eos, because converters store only one token."""
_HARMONY_END_NAMES: Final = frozenset(("<|return|>", "<|call|>", "<|endoftext|>"))
"""The same of gpt-oss, where ``<|end|>`` ends one message of several."""
_CONTROL: Final = 3
_MIXTURES: Final = {
    "Dots1ForCausalLM": "dots1",
    "Glm4MoeForCausalLM": "glm4moe",
    "GptOssForCausalLM": "gpt-oss",
    "MixtralForCausalLM": "llama",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3MoeForCausalLM": "qwen3moe",
}
"""Architectures with experts, and what files call them."""
_SIGMOID: Final = 2
"""What files call sigmoids as the scores of experts."""
_GRANITE_FACTORS: Final[Mapping[str, str]] = {
    # key behind granite. -> name in config.json
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_WIDEST_GEMMA: Final = {"gemma2": 46, "gemma3": 62}
"""Layers of the one size whose attention is scaled by its width over its heads; the file does not say how."""


def read_config(file: GgufFile) -> dict[str, Any]:
    """The configuration that a checkpoint of the same model would have.

    Raises:
        ModelLoadError: The architecture is not served, a value is missing, or it says what is not served.
    """
    make = _ARCHITECTURES.get(file.architecture)
    if make is None:
        raise ModelLoadError(
            f"{file.path} has the architecture {file.architecture!r}, which rustvllm does not support as GGUF; "
            f"supported: {', '.join(sorted(_ARCHITECTURES))}. Use the model's safetensors files"
        )
    config = make(file)
    shapes = {name: shape for name, _, shape, *_ in file.header.tensors()}
    embedding = shapes.get("token_embd.weight")
    if embedding is None or len(embedding) != 2:
        raise ModelLoadError(f"{file.path} has no token_embd.weight with two dimensions, so it does not hold a model")
    config["vocab_size"] = embedding[0]
    config["tie_word_embeddings"] = "output.weight" not in shapes
    config["dtype"] = _dtype(file)
    config["bos_token_id"] = file.integer("tokenizer.ggml.bos_token_id")
    config["eos_token_id"] = _end_ids(file) or None
    return config


def read_generation_config(file: GgufFile) -> dict[str, Any]:
    """The model's own sampling defaults."""
    named = ((name, file.number(f"general.sampling.{key}")) for key, name in _SAMPLING.items())
    return {name: value for name, value in named if value is not None}


def _end_ids(file: GgufFile) -> list[int]:
    ids = [file.integer(f"tokenizer.ggml.{key}") for key in _END_KEYS]
    tokens, types = file.items("tokenizer.ggml.tokens", str), file.items("tokenizer.ggml.token_type", int)
    names = _HARMONY_END_NAMES if file.architecture == "gpt-oss" else _END_NAMES
    ids += [
        i for i, (token, kind) in enumerate(zip(tokens, types, strict=False)) if kind == _CONTROL and token in names
    ]
    return list(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def _dtype(file: GgufFile) -> str:
    """What most of the file's bytes are; blocks are nearest to bfloat16."""
    bytes_of: dict[str, int] = {}
    for _, kind, _, _, _, nbytes in file.header.tensors():
        bytes_of[kind] = bytes_of.get(kind, 0) + nbytes
    most = max(bytes_of, key=lambda kind: bytes_of[kind], default="F32")
    return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")


def _common(file: GgufFile, architecture: str) -> dict[str, Any]:
    """What all families have."""
    prefix = file.architecture
    if file.integer(f"{prefix}.expert_count", 0) and architecture not in _MIXTURES:
        raise ModelLoadError(
            f"{file.path} is a mixture-of-experts model ({prefix}.expert_count) of the architecture {prefix!r}, which "
            f"rustvllm does not support as GGUF; with experts it supports {', '.join(sorted(_MIXTURES.values()))}. Use "
            "the model's safetensors files"
        )
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": prefix,
        "hidden_size": _needed(file, "embedding_length"),
        "num_hidden_layers": _needed(file, "block_count"),
        "num_attention_heads": _needed(file, "attention.head_count"),
        "intermediate_size": _needed(file, "feed_forward_length"),
        "max_position_embeddings": _needed(file, "context_length"),
    }
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    config["num_key_value_heads"] = file.integer(f"{prefix}.attention.head_count_kv") or heads
    default = hidden // heads
    config["head_dim"] = file.integer(f"{prefix}.attention.key_length") or default
    value_length = file.integer(f"{prefix}.attention.value_length") or default
    if value_length != config["head_dim"]:
        raise ModelLoadError(
            f"{file.path}: keys have {config['head_dim']} features, but values have {value_length}, which is not "
            "supported"
        )
    return config


def _needed(file: GgufFile, key: str) -> int:
    value = file.integer(f"{file.architecture}.{key}")
    if value is None or value <= 0:
        raise ModelLoadError(f"{file.path}: {file.architecture}.{key} must be a positive number, got {value}")
    return value


def _rotary(file: GgufFile, architecture: str) -> dict[str, Any]:
    """What all families with rotary positions and RMSNorm have."""
    config, prefix = _common(file, architecture), file.architecture
    config["rms_norm_eps"] = file.number(f"{prefix}.attention.layer_norm_rms_epsilon", 1e-6)
    theta = file.number(f"{prefix}.rope.freq_base", 10_000.0)
    config["rope_theta"] = theta
    turned = file.integer(f"{prefix}.rope.dimension_count")
    if turned is not None and (not 0 < turned <= config["head_dim"] or turned % 2):
        raise ModelLoadError(
            f"{file.path}: {prefix}.rope.dimension_count must be an even number from 2 to {config['head_dim']}, the "
            f"features of a head, got {turned}"
        )
    if turned is not None and turned != config["head_dim"]:
        config["partial_rotary_factor"] = turned / config["head_dim"]
    scaling = _rope_scaling(file, config)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config


def _rope_scaling(file: GgufFile, config: dict[str, Any]) -> dict[str, Any] | None:
    key = f"{file.architecture}.rope.scaling"
    trained = file.integer(f"{key}.original_context_length")
    factors = file.numbers_of("rope_freqs.weight")
    if factors is not None:  # Llama 3.1: the frequencies' own factors are stored, whatever they were made of
        config["original_max_position_embeddings"] = config["max_position_embeddings"]
        return {
            "rope_type": "longrope",
            "factor": 1.0,
            "attention_factor": 1.0,
            "short_factor": factors,
            "long_factor": factors,
        }
    kind = file.text(f"{key}.type", "none")
    long, short = (file.numbers_of(f"rope_factors_{name}.weight") for name in ("long", "short"))
    if long is not None and short is not None:
        kind = "longrope"
    factor = file.number(f"{key}.factor")
    if kind not in _ROPE_TYPES:
        raise ModelLoadError(f"{file.path}: {key}.type is {kind!r:.80}; supported: {', '.join(_ROPE_TYPES)}")
    if kind == "none":
        return None
    if kind == "longrope":
        if trained is not None:
            config["original_max_position_embeddings"] = trained
        scaling: dict[str, Any] = {"rope_type": kind, "short_factor": short, "long_factor": long}
        attention = file.number(f"{key}.attn_factor")
        return scaling if attention is None else scaling | {"attention_factor": attention}
    if factor is None or factor <= 0:
        raise ModelLoadError(f"{file.path}: {key}.type is {kind}, but {key}.factor is {factor}")
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = trained or config["max_position_embeddings"]
        for theirs, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if (value := file.number(f"{key}.{theirs}")) is not None:
                scaling[ours] = value
        attention = file.number(f"{key}.attn_factor")
        if attention is not None:  # on top of what follows from the factor
            scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    return scaling


def _experts(file: GgufFile, config: dict[str, Any], *, is_normed: bool = True) -> dict[str, Any]:
    """What all families with experts have besides.

    Args:
        file: The file.
        config: What it has so far.
        is_normed: Whether llama.cpp divides the weights of a token's experts by their sum if the file does not say.
    """
    prefix = file.architecture
    stored = file.header.get(f"{prefix}.expert_weights_norm")
    return config | {
        "num_local_experts": _needed(file, "expert_count"),
        "num_experts_per_tok": _needed(file, "expert_used_count"),
        "norm_topk_prob": stored if isinstance(stored, bool) else is_normed,
    }


def _mixtral(file: GgufFile) -> dict[str, Any]:
    config = _experts(file, _rotary(file, "MixtralForCausalLM")) | {"model_type": "mixtral"}
    if not config.pop("norm_topk_prob"):
        raise ModelLoadError(f"{file.path}: llama.expert_weights_norm is false, which is not supported")
    return config


def _qwen2_moe(file: GgufFile) -> dict[str, Any]:
    config = _experts(file, _rotary(file, "Qwen2MoeForCausalLM"), is_normed=False) | {"model_type": "qwen2_moe"}
    names = {name for name, *_ in file.header.tensors()}
    layers = range(config["num_hidden_layers"])
    config["mlp_only_layers"] = [layer for layer in layers if f"blk.{layer}.ffn_gate_inp.weight" not in names]
    config["moe_intermediate_size"] = _needed(file, "expert_feed_forward_length")
    config["shared_expert_intermediate_size"] = _needed(file, "expert_shared_feed_forward_length")
    config["qkv_bias"] = "blk.0.attn_q.bias" in names
    return config


def _grouped_experts(file: GgufFile, architecture: str) -> dict[str, Any]:
    """Families that choose by sigmoids, with a bias of the choice, behind some layers without experts."""
    config, prefix = _experts(file, _rotary(file, architecture), is_normed=False), file.architecture
    scores = file.integer(f"{prefix}.expert_gating_func", _SIGMOID)
    if scores != _SIGMOID:
        raise ModelLoadError(
            f"{file.path}: {prefix}.expert_gating_func is {scores}, which is not supported; supported: {_SIGMOID} "
            "(sigmoid)"
        )
    names = {name for name, *_ in file.header.tensors()}
    config["n_routed_experts"] = config.pop("num_local_experts")
    config["moe_intermediate_size"] = _needed(file, "expert_feed_forward_length")
    config["n_shared_experts"] = file.integer(f"{prefix}.expert_shared_count", 0)
    config["first_k_dense_replace"] = file.integer(f"{prefix}.leading_dense_block_count", 0)
    config["routed_scaling_factor"] = file.number(f"{prefix}.expert_weights_scale") or 1.0  # 0 means none
    config["n_group"] = file.integer(f"{prefix}.expert_group_count", 1)
    config["topk_group"] = file.integer(f"{prefix}.expert_group_used_count", 1)
    config["attention_bias"] = "blk.0.attn_q.bias" in names
    return config


def _dots1(file: GgufFile) -> dict[str, Any]:
    config = _grouped_experts(file, "Dots1ForCausalLM")
    config["sliding_window"] = file.integer("dots1.attention.sliding_window") or None
    return config


def _glm4_moe(file: GgufFile) -> dict[str, Any]:
    config = _grouped_experts(file, "Glm4MoeForCausalLM") | {"model_type": "glm4_moe"}
    config["use_qk_norm"] = any(name == "blk.0.attn_q_norm.weight" for name, *_ in file.header.tensors())
    # The file counts the layers that predict further tokens.
    further = file.integer("glm4moe.nextn_predict_layers", 0) or 0
    if not 0 <= further < config["num_hidden_layers"]:
        raise ModelLoadError(
            f"{file.path}: glm4moe.nextn_predict_layers must be 0 to {config['num_hidden_layers'] - 1}, fewer than "
            f"glm4moe.block_count, got {further}"
        )
    config["num_nextn_predict_layers"] = further
    config["num_hidden_layers"] -= further
    config.setdefault("partial_rotary_factor", 1.0)
    return config


def _qwen3_moe(file: GgufFile) -> dict[str, Any]:
    config = _experts(file, _rotary(file, "Qwen3MoeForCausalLM")) | {"model_type": "qwen3_moe"}
    names = {name for name, *_ in file.header.tensors()}
    layers = range(config["num_hidden_layers"])
    config["mlp_only_layers"] = [layer for layer in layers if f"blk.{layer}.ffn_gate_inp.weight" not in names]
    config["moe_intermediate_size"] = _needed(file, "expert_feed_forward_length")
    config["attention_bias"] = "blk.0.attn_q.bias" in names
    return config


def _gpt_oss(file: GgufFile) -> dict[str, Any]:
    config = _experts(file, _rotary(file, "GptOssForCausalLM")) | {"model_type": "gpt_oss"}
    config.pop("norm_topk_prob")  # a softmax over the chosen experts alone
    config["intermediate_size"] = _needed(file, "expert_feed_forward_length")
    config["sliding_window"] = _needed(file, "attention.sliding_window")
    config["attention_bias"] = any(name == "blk.0.attn_q.bias" for name, *_ in file.header.tensors())
    if "rope_scaling" in config:  # as it was trained; the file does not say so
        config["rope_scaling"]["truncate"] = False
    else:
        config["rope_parameters"] = {"rope_type": "default"}
    return config


def _llama(file: GgufFile) -> dict[str, Any]:
    if file.integer("llama.expert_count", 0):
        return _mixtral(file)
    return _with_biases(file, "LlamaForCausalLM")


def _with_biases(file: GgufFile, architecture: str) -> dict[str, Any]:
    config = _rotary(file, architecture)
    names = {name for name, *_ in file.header.tensors()}
    config["attention_bias"] = "blk.0.attn_q.bias" in names
    config["mlp_bias"] = "blk.0.ffn_up.bias" in names
    return config


def _smollm3(file: GgufFile) -> dict[str, Any]:
    # Files do not say which layers rotate; those of every model so far are the default.
    return _with_biases(file, "SmolLM3ForCausalLM")


def _granite(file: GgufFile) -> dict[str, Any]:
    config = _with_biases(file, "GraniteForCausalLM")
    # A file without a scale of attention has that of other models.
    config["attention_multiplier"] = file.number("granite.attention.scale") or config["head_dim"] ** -0.5
    for key, name in _GRANITE_FACTORS.items():
        config[name] = file.number(f"granite.{key}") or 1.0
    return config


def _olmo2(file: GgufFile) -> dict[str, Any]:
    """OLMo 2, or with windows OLMo 3."""
    window = file.integer("olmo2.attention.sliding_window")
    if not window:
        return _rotary(file, "Olmo2ForCausalLM")
    config = _rotary(file, "Olmo3ForCausalLM") | {"model_type": "olmo3", "sliding_window": window}
    pattern = file.header.get("olmo2.attention.sliding_window_pattern")
    if isinstance(pattern, list):  # for each layer whether it slides
        config["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    attention = file.number("olmo2.rope.scaling.attn_factor")
    if attention is not None and "rope_scaling" in config:  # the configuration's own number: all of the factor
        config["rope_scaling"]["attention_factor"] = attention
    return config


def _qwen2(file: GgufFile) -> dict[str, Any]:
    return _rotary(file, "Qwen2ForCausalLM")


def _qwen3(file: GgufFile) -> dict[str, Any]:
    config = _rotary(file, "Qwen3ForCausalLM")
    config["attention_bias"] = any(name == "blk.0.attn_q.bias" for name, *_ in file.header.tensors())
    return config


def _phi3(file: GgufFile) -> dict[str, Any]:
    config = _rotary(file, "Phi3ForCausalLM")
    config["sliding_window"] = file.integer("phi3.attention.sliding_window") or None
    return config


def _gemma(file: GgufFile, architecture: str) -> dict[str, Any]:
    config, prefix = _rotary(file, architecture), file.architecture
    config["hidden_activation"] = "gelu_pytorch_tanh"
    config["sliding_window"] = file.integer(f"{prefix}.attention.sliding_window") or 4096
    is_widest = config["num_hidden_layers"] == _WIDEST_GEMMA[prefix]
    heads_width = config["hidden_size"] / config["num_attention_heads"]
    config["query_pre_attn_scalar"] = heads_width if is_widest else config["head_dim"]
    return config


def _gemma2(file: GgufFile) -> dict[str, Any]:
    config = _gemma(file, "Gemma2ForCausalLM")
    config["attn_logit_softcapping"] = file.number("gemma2.attn_logit_softcapping", 50.0) or None
    config["final_logit_softcapping"] = file.number("gemma2.final_logit_softcapping", 30.0) or None
    return config


def _gemma3(file: GgufFile) -> dict[str, Any]:
    config = _gemma(file, "Gemma3ForCausalLM") | {"model_type": "gemma3_text"}
    config["final_logit_softcapping"] = file.number("gemma3.final_logit_softcapping") or None
    config["rope_local_base_freq"] = file.number("gemma3.rope.freq_base_swa", 10_000.0)
    pattern = file.header.get("gemma3.attention.sliding_window_pattern")
    if isinstance(pattern, list):  # for each layer whether it slides
        config["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    elif pattern is not None:
        config["sliding_window_pattern"] = file.integer("gemma3.attention.sliding_window_pattern")
    return config


def _gpt2(file: GgufFile) -> dict[str, Any]:
    config = _common(file, "GPT2LMHeadModel")
    return {
        "architectures": config["architectures"],
        "model_type": "gpt2",
        "n_embd": config["hidden_size"],
        "n_layer": config["num_hidden_layers"],
        "n_head": config["num_attention_heads"],
        "n_inner": config["intermediate_size"],
        "n_positions": config["max_position_embeddings"],
        "layer_norm_epsilon": file.number("gpt2.attention.layer_norm_epsilon", 1e-5),
        "activation_function": "gelu_new",
    }


_ARCHITECTURES: Final[Mapping[str, Callable[[GgufFile], dict[str, Any]]]] = {
    "dots1": _dots1,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "glm4moe": _glm4_moe,
    "gpt-oss": _gpt_oss,
    "gpt2": _gpt2,
    "granite": _granite,
    "llama": _llama,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "smollm3": _smollm3,
}
