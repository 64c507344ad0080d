"""Checkpoints that other tools quantised: how their configuration describes the weights.

rustvllm reads AWQ, GPTQ, compressed-tensors, FP8 and MXFP4. It refuses all others by name and says what works instead.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rustvllm.exceptions import ConfigError, ModelLoadError

FOLDER_METHODS: Final = ("awq", "gptq", "compressed-tensors", "fp8", "mxfp4")
"""Methods that rustvllm reads, as ``quant_method`` and ``--quantization`` name them."""
SAME_METHODS: Final[Mapping[str, str]] = {"awq_marlin": "awq", "gptq_marlin": "gptq"}
"""Names of GPU kernels for one of these methods; the stored weights are the same."""
_NAMES: Final[Mapping[str, str]] = {
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "fp8": "FP8",
    "gptq": "GPTQ",
    "mxfp4": "MXFP4",
}
_OLD_FILES: Final = ("quantize_config.json", "quant_config.json")
"""Files in which the first tools stored what is now ``quantization_config``."""
_MAX_OLD_BYTES: Final = 1 << 20
_CT_FORMATS: Final[Mapping[str, str]] = {
    "pack-quantized": "packed",
    "int-quantized": "whole",
    "naive-quantized": "whole",
    "float-quantized": "fp8",
}
_CHANNEL: Final = -1
_MXFP4_BITS: Final = 4
_MXFP4_GROUP: Final = 32


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """How a folder's dense layers are stored.

    Attributes:
        method: One of ``FOLDER_METHODS``.
        bits: Of a number; several where groups of layers differ.
        group_sizes: Inputs that may share a scale; -1: all.
        is_less_one: GPTQ's first form, which stores zero points less one.
        file: That says so, for messages.
        block: Outputs and inputs that share a scale, of FP8 by blocks; None: as the shape of the scales says.
        needs_zeros: Every weight must have zero points, because the configuration says that none is symmetric.
    """

    method: str
    bits: tuple[int, ...]
    group_sizes: tuple[int, ...]
    file: Path
    is_less_one: bool = False
    block: tuple[int, int] | None = None
    needs_zeros: bool = False

    def __str__(self) -> str:
        bits = " and ".join(str(bits) for bits in self.bits)
        groups = " and ".join("whole rows" if size == _CHANNEL else f"groups of {size}" for size in self.group_sizes)
        return f"{_NAMES[self.method]} of {bits} bits" + (f", {groups}" if groups else "")


def find_quantization(config: Mapping[str, Any], path: Path) -> Mapping[str, Any] | None:
    """What a checkpoint says of its quantisation, in ``config.json`` or in the file of its own that old tools wrote.

    Args:
        config: ``config.json`` with the values that override it.
        path: The model's folder.

    Raises:
        ModelLoadError: One of them is not a JSON object.
    """
    for key in ("quantization_config", "compression_config"):
        if key in config:
            how = config[key]
            if how is not None and not isinstance(how, Mapping):
                raise ModelLoadError(f"{path / 'config.json'}: {key} must be a JSON object or null, got {how!r:.80}")
            return how or None
    for name in _OLD_FILES:
        file = path / name
        if not file.is_file() or file.stat().st_size > _MAX_OLD_BYTES:
            continue
        try:
            how = json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise ModelLoadError(f"{file} is not valid JSON: {error!s:.200}") from error
        if not isinstance(how, dict):
            raise ModelLoadError(f"{file} must hold a JSON object, not {type(how).__name__}")
        return {"quant_method": "awq" if "w_bit" in how else "gptq", **how}
    return None


def read_quantization(config: Mapping[str, Any], path: Path) -> StoredQuantization | None:
    """How the dense layers of a folder are stored; None: as the tensors' types say.

    Raises:
        ModelLoadError: In a way that is not read; names it, and what works instead.
    """
    how = find_quantization(config, path)
    if how is None:
        return None
    file = path / "config.json"
    method = how.get("quant_method")
    if not isinstance(method, str):
        raise ModelLoadError(f"{file}: quantization_config names no quant_method")
    method = SAME_METHODS.get(method, method)
    read = _READERS.get(method)
    if read is None:
        raise _refusal(file, _described(method, how), "")
    return read(how, file)


def refuse_undescribed(dtypes: Mapping[str, str], folder: Path) -> None:
    """Refuse a folder that has parts of quantised weights, but no configuration that says how to read them.

    Args:
        dtypes: Of every tensor of the folder, by its name, as safetensors names them.
        folder: For the message.

    Raises:
        ModelLoadError: Names some of the tensors, and what is missing.
    """
    parts = [name for name in dtypes if _is_part(name, dtypes)]
    if parts:
        raise ModelLoadError(
            f"{folder}: {len(parts)} tensors ({', '.join(parts[:2])}, …) are parts of quantised weights, but "
            "config.json has no quantization_config that says how to read them; copy it from the original checkpoint"
        )


def _is_part(name: str, dtypes: Mapping[str, str]) -> bool:
    layer, _, kind = name.rpartition(".")
    if kind in ("weight_scale", "weight_scale_inv"):
        return dtypes.get(f"{layer}.weight") in ("I8", "F8_E4M3")
    return kind in ("qweight", "weight_packed") or (kind.endswith("_blocks") and dtypes[name] == "U8")


def check_method(asked: str | None, stored: StoredQuantization | None, name: str) -> None:
    """Compare ``--quantization`` with the folder's own quantisation.

    Raises:
        ConfigError: They contradict each other.
    """
    asked = SAME_METHODS.get(asked or "", asked or "")
    if asked not in FOLDER_METHODS:
        return
    if stored is None:
        raise ConfigError(
            f"quantization is {asked}, but {name} is not quantised: leave quantization out, or set it to int8 to "
            "quantise the weights at loading"
        )
    if stored.method != asked:
        raise ConfigError(
            f"quantization is {asked}, but {name} is {stored} (quant_method {stored.method!r} in its config.json): "
            "leave quantization out"
        )


def _awq(how: Mapping[str, Any], file: Path) -> StoredQuantization:
    what = _described("awq", how)
    version = str(how.get("version", how.get("format", "gemm"))).lower()
    if version not in ("gemm", "exllama"):
        raise _refusal(file, what, f" in the layout of version {version!r:.40}; rustvllm reads gemm")
    if str(how.get("backend", "autoawq")).lower() == "llm-awq":
        raise _refusal(file, what, " in the layout of the backend llm-awq; rustvllm reads autoawq")
    if how.get("zero_point", True) is not True:
        raise _refusal(file, what, " without zero points (zero_point is not true)")
    bits = _one_of(how, ("bits", "w_bit"), (4,), file, what)
    return StoredQuantization("awq", (bits,), (_group_size(how, ("group_size", "q_group_size"), file),), file)


def _gptq(how: Mapping[str, Any], file: Path) -> StoredQuantization:
    what = _described("gptq", how)
    form = how.get("checkpoint_format") or how.get("format") or "gptq"
    if how.get("is_marlin_format") is True:
        form = "marlin"
    if form not in ("gptq", "gptq_v2"):
        raise _refusal(file, what, f" in the checkpoint_format {form!r:.40}; rustvllm reads gptq and gptq_v2")
    if how.get("pack_dtype", "int32") != "int32":
        raise _refusal(file, what, f" packed into {how['pack_dtype']!r:.40}; rustvllm reads int32")
    rules = how.get("dynamic") or {}
    changed = [rule for rule in rules if not rule.startswith("-:")] if isinstance(rules, Mapping) else [rules]
    if changed:
        raise _refusal(file, what, f" with other settings for some layers (dynamic: {changed[0]!r:.60})")
    bits = _one_of(how, ("bits",), (4, 8), file, what)
    group_size = _group_size(how, ("group_size",), file)
    return StoredQuantization("gptq", (bits,), (group_size,), file, is_less_one=form == "gptq")


def _compressed(how: Mapping[str, Any], file: Path) -> StoredQuantization:
    what = _described("compressed-tensors", how)
    sparsity = how.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity and sparsity.get("format", "dense") != "dense":
        raise _refusal(file, what, f" with sparse weights ({sparsity.get('format')!r:.40})")
    if how.get("transform_config"):
        raise _refusal(file, what, " with rotated weights (transform_config)")
    groups = how.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ModelLoadError(
            f"{file}: quantization_config lacks config_groups, which describe how the weights are stored"
        )
    bits: dict[int, None] = {}
    sizes: dict[int, None] = {}
    is_symmetric: list[bool] = []
    block = None
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise _refusal(file, what, f" whose config group {name!r:.40} does not quantise weights")
        form = group.get("format") or how.get("format")
        read = _CT_FORMATS.get(form) if isinstance(form, str) else None
        kind = weights.get("type", "int")
        is_float = kind == "float"
        if kind not in ("int", "float") or read not in (("whole", "fp8") if is_float else ("packed", "whole")):
            raise _refusal(
                file, what, f" in the format {form!r:.40} of type {kind!r:.20}; rustvllm reads {', '.join(_CT_FORMATS)}"
            )  # fmt: skip
        is_symmetric.append(is_float or weights.get("symmetric") is not False)
        bits[_one_of(weights, ("num_bits",), (8,) if is_float else (4, 8), file, what)] = None
        strategy = weights.get("strategy")
        if strategy in (None, "group") and weights.get("group_size") is not None:
            sizes[_group_size(weights, ("group_size",), file)] = None
        elif strategy == "block" and is_float:
            block = _block(weights.get("block_structure"), file)
            sizes[_CHANNEL] = None
        elif strategy in (None, "channel", "tensor"):
            sizes[_CHANNEL] = None
        else:
            raise _refusal(
                file,
                what,
                f" with the strategy {strategy!r:.40} for scales; rustvllm reads tensor, channel and group, and "
                "block for floats",
            )
    zeros = not any(is_symmetric)
    return StoredQuantization("compressed-tensors", tuple(bits), tuple(sizes), file, block=block, needs_zeros=zeros)


def _fp8(how: Mapping[str, Any], file: Path) -> StoredQuantization:
    form = how.get("fmt", "e4m3")
    if form != "e4m3":
        raise _refusal(file, _described("fp8", how), f" in the format {form!r:.40}; rustvllm reads e4m3")
    block = how.get("weight_block_size")
    return StoredQuantization("fp8", (8,), (), file, block=None if block is None else _block(block, file))


def _mxfp4(_: Mapping[str, Any], file: Path) -> StoredQuantization:
    return StoredQuantization("mxfp4", (_MXFP4_BITS,), (_MXFP4_GROUP,), file)


_READERS: Final[Mapping[str, Callable[[Mapping[str, Any], Path], StoredQuantization]]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
}


def _block(value: object, file: Path) -> tuple[int, int]:
    sizes = value if isinstance(value, list) else []
    is_whole = [isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes]
    if is_whole != [True, True]:
        raise ModelLoadError(
            f"{file}: the block size of the quantisation must be two integers above 0, got {value!r:.80}"
        )
    return sizes[0], sizes[1]


def _one_of(how: Mapping[str, Any], names: Sequence[str], allowed: Sequence[int], file: Path, what: str) -> int:
    value = next((how[name] for name in names if name in how), None)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelLoadError(f"{file}: {names[0]} of the quantisation must be an integer, got {value!r:.80}")
    if value not in allowed:
        numbers = " and ".join(str(bits) for bits in allowed)
        raise _refusal(file, what, f"; rustvllm reads {numbers} bits")
    return value


def _group_size(how: Mapping[str, Any], names: Sequence[str], file: Path) -> int:
    value = next((how[name] for name in names if name in how), None)
    if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != _CHANNEL):
        raise ModelLoadError(
            f"{file}: {names[0]} of the quantisation must be an integer above 0, or -1 for all inputs, got "
            f"{value!r:.80}"
        )
    return value


def _described(method: str, how: Mapping[str, Any]) -> str:
    what = _NAMES.get(method, method)[:40]
    if method == "bitsandbytes":
        return f"{what} {how.get('bnb_4bit_quant_type', 'nf4') if how.get('load_in_4bit') else 'int8'!s:.20}"
    bits = how.get("bits", how.get("w_bit"))
    return f"{what} of {bits} bits" if isinstance(bits, int) else what


def _refusal(file: Path, what: str, how: str) -> ModelLoadError:
    return ModelLoadError(
        f"{file}: this checkpoint is {what}{how} (quantization_config), which rustvllm does not support. Use a GGUF "
        "file of this model (--model owner/name:Q8_0), or its unquantised checkpoint, on the CPU with --quantization "
        "int8"
    )
