"""From a model's folder to :class:`ModelConfig`: reads ``config.json`` and ``generation_config.json`` as plain JSON.

Neither torch nor transformers is needed, so a wrong model is refused before seconds are spent importing them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rustvllm.config import ModelConfig
from rustvllm.config.architectures import (
    ARCHITECTURES,
    BARE_CLASSES,
    CLASSIFIER_CLASSES,
    HEAD_DIMS,
    MODEL_TYPES,
    MULTI_HEAD,
    SUPPORTED_ARCHITECTURES,
    text_config,
)
from rustvllm.config.checkpoint import gguf_config
from rustvllm.config.checkpoint.gguf_file import GgufFile, is_gguf
from rustvllm.config.checkpoint.quantized_folders import read_quantization
from rustvllm.config.pooler import find_pooler, longest_text
from rustvllm.config.rope import check_rope, longest_sequence
from rustvllm.config.vision import VisionConfig
from rustvllm.config.vision.folder import read_vision
from rustvllm.exceptions import ConfigError, ModelLoadError
from rustvllm.logger import init_logger

logger = init_logger(__name__)

MAX_CONFIG_BYTES: Final = 16 << 20
_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    # what is needed -> its names in config.json, the first that is there counts
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "max_positions": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"),
}
_NAMES_OF_ARCHITECTURE: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    # names that differ in this architecture come first, so that messages use the names in its checkpoints
    "GPT2LMHeadModel": {
        "hidden_size": ("n_embd", "hidden_size"),
        "num_layers": ("n_layer", "num_hidden_layers"),
        "num_attention_heads": ("n_head", "num_attention_heads"),
        "max_positions": ("n_positions", "n_ctx", "max_position_embeddings"),
    },
}


MAX_DIGITS: Final = 300
MAX_INTEGER: Final = 2**31 - 1
"""Limit of positions, heads and sizes, which are numbers of 32 bits in the core."""
MAX_LAYERS: Final = 4096
"""Far more than any model has; each layer costs time even before it has memory."""
_FALLBACK_ENDINGS: Final = ("ForCausalLM", "LMHeadModel")
"""How transformers' names of classes that predict the next token end."""
_UNREACHABLE: Final[Mapping[str, str]] = {
    # model_type -> why transformers' modelling code cannot run over a paged cache; the rest is found out while loading
    **dict.fromkeys(
        ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "recurrent_gemma", "jamba", "bamba", "zamba", "zamba2"),
        "it keeps a recurrent state, which the paged KV cache cannot hold",
    ),
    **dict.fromkeys(("bloom", "mpt"), "it adds ALiBi biases inside its own attention, which rustvllm cannot replace"),
    **dict.fromkeys(
        ("falcon", "gptj", "gpt_neo", "codegen", "openai-gpt", "xglm", "xlnet", "xlm"),
        "its attention does not go through transformers' attention interface",
    ),
}


def read_model_config(
    path: Path,
    *,
    model: str,
    max_model_len: int | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    generation_config: str = "auto",
    override_generation_config: Mapping[str, Any] | None = None,
    hf_overrides: Mapping[str, Any] | None = None,
    model_impl: str = "auto",
    trust_remote_code: bool = False,
    hf_config_path: Path | None = None,
    runner: str = "generate",
    convert: str = "auto",
    pooler_config: Mapping[str, Any] | None = None,
    limit_mm_per_prompt: Mapping[str, Any] | None = None,
    mm_processor_kwargs: Mapping[str, Any] | None = None,
    **fields: Any,
) -> ModelConfig:
    """Read a model's folder, or its GGUF file.

    Args:
        path: Folder with ``config.json``, or a GGUF file.
        model: The model's name, for messages and as its served name.
        max_model_len: Most tokens of prompt and output; None: what the model was made for.
        dtype: ``auto`` or a type; auto is float32 on the CPU, on a GPU what the weights are in (float32 as float16).
        device: ``cpu`` or ``cuda``, which decides what auto means.
        generation_config: ``auto`` reads the folder's, ``vllm`` and ``none`` read nothing, else a folder or file.
        override_generation_config: Values that win over those read.
        hf_overrides: Values that win over those of ``config.json``; an object is merged into the object it meets.
        model_impl: ``rustvllm`` or ``transformers``: whose modelling code runs; ``auto``: ours where there is one.
        trust_remote_code: Code of the model's folder may run, where neither knows the architecture.
        hf_config_path: Folder whose ``config.json`` counts instead.
        runner: ``generate``, ``pooling`` or ``auto``; see :func:`~rustvllm.config.pooler.find_pooler`.
        convert: ``auto``, ``none``, ``embed`` or ``classify``.
        pooler_config: How embeddings are made, where it differs from what the folder says.
        limit_mm_per_prompt: Most images of a prompt, as ``{"image": 4}``.
        mm_processor_kwargs: How images are resized, as ``{"max_pixels": 1003520}``.
        fields: Further fields of :class:`ModelConfig`.

    Raises:
        ModelLoadError: ``config.json`` is missing, no JSON, of an unknown architecture or lacks keys (which it names).
        ConfigError: ``max_model_len`` is more than the model can do.
    """
    gguf = GgufFile(path) if is_gguf(path) else None
    if gguf is not None and model_impl == "transformers":
        raise ConfigError(f"model_impl is transformers, but {path.name} is a GGUF file: leave model_impl out")
    stored = _read_stored(path, gguf, hf_config_path)
    file = path if gguf is not None and hf_config_path is None else (hf_config_path or path) / "config.json"
    config = merge_overrides(stored, hf_overrides or {})
    if gguf is None:
        read_quantization(config, path)  # refuses what is not read
    pooler = find_pooler(path, config, runner=runner, convert=convert, pooler_config=pooler_config)
    if pooler is not None and runner == "auto":
        if pooler.classifier is not None:
            logger.info("%s classifies prompts (--runner pooling --convert classify)", model)
        else:
            logger.info("%s makes embeddings (--runner pooling); --runner generate makes it generate text", model)
    architecture, model_impl = find_architecture(config, file, model_impl, device, may_lack_head=pooler is not None)
    if gguf is not None and model_impl == "transformers":
        raise ModelLoadError(
            f"{file} has the architecture {architecture}, which as GGUF only runs on the CPU, but device is {device}: "
            "set device to cpu, or use the model's safetensors files"
        )
    vision = read_vision(
        path, config, architecture, file, limit_mm_per_prompt, max_model_len=max_model_len, sizes=mm_processor_kwargs
    )
    if model_impl == "rustvllm":
        config = text_config(config)
    numbers: dict[str, Any] = _read_numbers(config, architecture, file)
    numbers |= _read_head_sizes(config, architecture, numbers, file)
    if vision is not None:
        _check_image_tokens(vision, numbers["vocab_size"], file)
    positions = numbers.pop("max_positions")
    if gguf is not None and generation_config == "auto":
        generation = gguf_config.read_generation_config(gguf)
    else:
        generation = _read_generation_config(path, generation_config)
    generation.update(override_generation_config or {})
    check_rope(config, file, positions)
    longest = longest_sequence(config, positions)
    if pooler is not None and pooler.classifier is None:
        longest = longest_text(path, longest)
    max_model_len = _check_max_model_len(max_model_len, longest, model)
    try:
        return ModelConfig(
            model=model,
            path=path,
            hf_config=config,
            config_file=file,
            architecture=architecture,
            dtype=resolve_dtype(dtype, device, config),
            max_model_len=max_model_len,
            eos_token_ids=_eos_token_ids(generation, config, numbers["vocab_size"], file),
            generation_config=generation,
            model_impl=model_impl,
            trust_remote_code=trust_remote_code,
            pooler=pooler,
            vision=None if vision is None else vision.for_length(max_model_len),
            **numbers,
            **fields,
        )
    except ConfigError as error:
        if str(error).startswith("num_attention_heads"):
            raise ModelLoadError(f"{file}: {error}") from error
        raise


def _read_stored(path: Path, gguf: GgufFile | None, hf_config_path: Path | None) -> dict[str, Any]:
    """The configuration as it is stored: in the folder named for it, in a GGUF file, or in the model's folder."""
    if gguf is not None:
        gguf.refuse_unread_types()
    if hf_config_path is None and gguf is not None:
        return gguf_config.read_config(gguf)
    folder = hf_config_path or path
    stored = _read_json(folder / "config.json")
    if stored is None:
        raise ModelLoadError(f"{folder} has no config.json")
    if gguf is not None:  # what the weights of another checkpoint are says nothing of these
        stored.pop("quantization_config", None)
    return stored


def merge_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration in which the overriding values win.

    Args:
        config: As it was read.
        overrides: An object in it is merged, key by key, into the object of that name; anything else replaces.
    """
    merged = dict(config)
    for name, value in overrides.items():
        before = merged.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            merged[name] = merge_overrides(before, value)
        else:
            merged[name] = value
    return merged


def find_architecture(
    config: Mapping[str, Any],
    file: Path,
    model_impl: str = "auto",
    device: str = "cpu",
    *,
    may_lack_head: bool = False,
) -> tuple[str, str]:
    """The class that serves a model, and who provides it.

    The first of ``architectures`` that this project has, or the one that ``model_type`` stands for when none is named;
    else the first that transformers may have. Whether that can run is known once transformers is imported.

    Args:
        config: Of the model.
        file: That it was read from, for messages.
        model_impl: As for :func:`read_model_config`.
        device: Likewise.
        may_lack_head: The class may also be the one without a head, or the one that classifies.

    Returns:
        The class's name, and ``rustvllm`` or ``transformers``.

    Raises:
        ModelLoadError: Names what the model is and what is supported.
    """
    named = config.get("architectures")
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    model_type = config.get("model_type")
    if not names and isinstance(model_type, str) and model_type in MODEL_TYPES:
        names = [MODEL_TYPES[model_type]]
    if may_lack_head:
        names = [BARE_CLASSES.get(name, CLASSIFIER_CLASSES.get(name, name)) for name in names]
    if model_impl != "transformers":
        for name in names:
            row = ARCHITECTURES.get(name)
            if row is not None and (device == "cpu" or not row.is_cpu_only):
                return name, "rustvllm"
            if row is not None and model_impl == "rustvllm":
                raise ModelLoadError(
                    f"{file} has the architecture {name}, which rustvllm's own code only runs on the CPU, but device "
                    f"is {device}: set device to cpu, or model_impl to auto, so that transformers' code runs it"
                )
    if names:
        what = f"has the architecture {', '.join(names)}"
    elif isinstance(model_type, str):
        what = f"has the model_type {model_type}"
    else:
        what = "names no architecture (neither 'architectures' nor 'model_type')"
    supported = f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
    if model_impl == "rustvllm":
        raise ModelLoadError(
            f"{file} {what}; with --model-impl rustvllm {supported}; --model-impl auto also tries "
            "transformers' modelling code"
        )
    others = "and, through transformers' modelling code, decoders whose class ends in ForCausalLM"
    candidate = next((name for name in names if name.endswith(_FALLBACK_ENDINGS)), None)
    if candidate is None:
        raise ModelLoadError(f"{file} {what}; {supported}, {others}")
    why = _UNREACHABLE.get(model_type) if isinstance(model_type, str) else None
    if config.get("is_encoder_decoder") is True:
        why = "it is an encoder-decoder model, and rustvllm only serves decoders"
    if why is not None:
        raise ModelLoadError(
            f"{file} {what}, which rustvllm does not have, and cannot run through transformers' "
            f"modelling code: {why}; {supported}, {others}"
        )
    return candidate, "transformers"


def resolve_dtype(dtype: str, device: str, config: Mapping[str, Any]) -> str:
    """The type to compute in: ``auto`` becomes a definite one, other names become torch's.

    Raises:
        ConfigError: Not a type a model can compute in.
    """
    names = {"half": "float16", "float": "float32", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
    dtype = str(dtype).removeprefix("torch.")
    dtype = names.get(dtype, dtype)
    if dtype not in ("auto", "float16", "bfloat16", "float32"):
        raise ConfigError(f"dtype must be one of auto, float32, float16, half, bfloat16, float, got {dtype!r}")
    if dtype != "auto":
        return dtype
    if device == "cpu":
        return "float32"
    stored = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    return "bfloat16" if stored == "bfloat16" else "float16"


def _read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object from a file; None when there is no such file."""
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ModelLoadError(f"{path} has {path.stat().st_size} bytes; the limit is {MAX_CONFIG_BYTES}")
        value = json.loads(path.read_bytes(), parse_int=_parse_int)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _parse_int(digits: str) -> int:
    """An integer that fits into a float, whatever it is compared with or divided by later."""
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits, but the limit is {MAX_DIGITS}")
    return int(digits)


def _read_numbers(config: Mapping[str, Any], architecture: str, file: Path) -> dict[str, int]:
    numbers: dict[str, int] = {}
    missing = []
    for field, names in ({**_NAMES, **_NAMES_OF_ARCHITECTURE.get(architecture, {})}).items():
        name = next((name for name in names if config.get(name) is not None), None)
        if name is None:
            missing.append(names[0])
        else:
            numbers[field] = _positive_int(config[name], name, file)
            if field == "num_layers" and numbers[field] > MAX_LAYERS:
                raise ModelLoadError(f"{file}: {name} is {numbers[field]}, but the limit is {MAX_LAYERS} layers")
    if missing:
        raise ModelLoadError(
            f"{file} lacks {', '.join(missing)}, which {architecture} needs; --hf-overrides can add missing values"
        )
    return numbers


def _read_head_sizes(
    config: Mapping[str, Any], architecture: str, numbers: Mapping[str, int], file: Path
) -> dict[str, int]:
    """How many heads keys and values have, and how many features each head has."""
    heads, hidden_size = numbers["num_attention_heads"], numbers["hidden_size"]
    kv_heads = heads if architecture in MULTI_HEAD else _optional_int(config, "num_key_value_heads", file, heads)
    head_dim = _optional_int(config, "head_dim", file, HEAD_DIMS.get(architecture, 0))
    if not head_dim:
        if hidden_size % heads:
            raise ModelLoadError(f"{file}: hidden_size {hidden_size} is not a multiple of num_attention_heads {heads}")
        head_dim = hidden_size // heads
    return {"num_kv_heads": kv_heads, "head_dim": head_dim}


def _check_image_tokens(vision: VisionConfig, vocab_size: int, file: Path) -> None:
    for token_id in (vision.image_token_id, vision.placeholder_id):
        if token_id >= vocab_size:
            raise ModelLoadError(
                f"{file}: the token of images has the id {token_id}, which is not in the vocabulary (0 to "
                f"{vocab_size - 1})"
            )


def _positive_int(value: object, name: str, file: Path) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelLoadError(f"{file}: {name} must be a positive integer, got {value!r:.80}")
    if value > MAX_INTEGER:
        raise ModelLoadError(f"{file}: {name} is {value!s:.80}, but may be at most {MAX_INTEGER}")
    return value


def _optional_int(config: Mapping[str, Any], name: str, file: Path, default: int) -> int:
    value = config.get(name)
    return default if value is None else _positive_int(value, name, file)


def _check_max_model_len(asked: int | None, longest: int, model: str) -> int:
    if asked is None:
        return longest
    if asked > longest:
        raise ConfigError(
            f"max_model_len is {asked}, but the model {model} supports at most {longest} tokens: set max_model_len to "
            f"{longest} or less"
        )
    return asked


def _read_generation_config(path: Path, source: str) -> dict[str, Any]:
    if source in ("vllm", "none"):
        return {}
    if source == "auto":
        return _read_json(path / "generation_config.json") or {}
    place = Path(source).expanduser()
    file = place / "generation_config.json" if place.is_dir() else place
    value = _read_json(file)
    if value is None:
        raise ConfigError(f"generation_config names {source!r}, but there is no {file}")
    return value


def _eos_token_ids(
    generation: Mapping[str, Any], config: Mapping[str, Any], vocab_size: int, config_file: Path
) -> tuple[int, ...]:
    """Ids that end a generation: from generation_config.json, else config.json. Either may name one or several."""
    for source, file in ((generation, config_file.with_name("generation_config.json")), (config, config_file)):
        value = source.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise ModelLoadError(f"{file}: eos_token_id must hold token ids, got {value!r:.80}")
        outside = [token_id for token_id in ids if not 0 <= token_id < vocab_size]
        if outside:  # a default that a configuration with a smaller vocabulary inherited: it can never be sampled
            logger.warning("%s: eos_token_id %s is outside the vocabulary of %d", file, outside, vocab_size)
        ids = [token_id for token_id in ids if 0 <= token_id < vocab_size]
        return tuple(dict.fromkeys(ids))
    return ()
