"""Dense layers that other tools quantised: which of a folder's tensors make up one weight, and whether they fit.

AWQ, GPTQ, compressed-tensors, FP8 and MXFP4 store a weight as packed numbers with scales, perhaps with zero points and
an order of the inputs. Here each such set becomes one tensor of the model's shape. All that can be wrong with shapes
and types is found in the headers, and with small tensors (scales, the order of inputs) before anything else is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from rustvllm.byte_progress import ByteProgress
from rustvllm.config.checkpoint.quantized_folders import StoredQuantization
from rustvllm.config.checkpoint.whole_forms import SCALE_KINDS, NumberForm, ZeroKind
from rustvllm.exceptions import ModelLoadError
from rustvllm.logger import init_logger
from rustvllm.model_loader.checkpoint import FLOAT_DTYPES, MAX_NAMED, StoredTensor
from rustvllm.model_loader.reading import TensorReader

logger = init_logger(__name__)

SCALE_DTYPES: Final = ("F16", "BF16", "F32")
MAX_EXPONENT: Final = 252
"""Of a block of MXFP4, with a bias of 127: its largest number, 6 times a power of two, is finite in float32."""
MXFP4_BYTES: Final = 16
"""Of the numbers of a block of MXFP4."""
_WORD_BITS: Final = 32
_FEW_BITS: Final = 4
_PARTS: Final[Mapping[str, Mapping[str, str]]] = {
    # method -> what its tensors are called within a layer, and what they are here
    "gptq": {"qweight": "numbers", "scales": "scales", "qzeros": "zeros", "g_idx": "groups"},
    "awq": {"qweight": "numbers", "scales": "scales", "qzeros": "zeros"},
    "compressed-tensors": {
        "weight_packed": "numbers",
        "weight": "numbers",
        "weight_scale": "scales",
        "weight_zero_point": "zeros",
        "weight_g_idx": "groups",
        "weight_shape": "shape",
    },
    "fp8": {"weight": "numbers", "weight_scale": "scales", "weight_scale_inv": "scales"},
    "mxfp4": {"weight_blocks": "numbers", "weight_scales": "scales"},
}
_OF_ACTIVATIONS: Final = ("input_scale", "input_zero_point", "output_scale", "activation_scale", "k_scale", "v_scale")
"""Tensors that say how activations may be rounded, and the cache: they are computed as they are."""


@dataclass(frozen=True, slots=True)
class QuantizedTensor(StoredTensor):
    """A weight that several tensors of a folder make up.

    Attributes:
        parts: ``numbers``, ``scales`` and, where there are such, ``zeros`` and ``groups``.
        layout: How the numbers lie: ``gptq``, ``awq``, ``packed`` (compressed-tensors), ``whole`` (int8), ``fp8`` or
            ``mxfp4``.
        bits: Of a number.
        group_size: Inputs that share a scale; for ``fp8`` 0.
        is_whole: Whether numbers less zero points are whole ones of 8 bits, so that they can be kept as they are.
        block: Outputs and inputs that share a scale, of FP8; (0, 0): one for each row, or for all.
        group_of_input: int64 ``[in_features]``, the group of each input; None: those of a group are neighbours.
        is_less_one: Zero points are stored less one.
        has_middle_zeros: Numbers have 4 bits, and all zero points are 8.
    """

    parts: Mapping[str, StoredTensor] = field(default_factory=dict)
    layout: str = ""
    bits: int = 8
    group_size: int = 0
    is_whole: bool = False
    block: tuple[int, int] = (0, 0)
    group_of_input: Tensor | None = None
    is_less_one: bool = False
    has_middle_zeros: bool = False

    @property
    def form(self) -> NumberForm:
        """How its numbers are kept on the CPU: those of 4 bits as they are, if activations can be rounded with them."""
        if self.layout == "mxfp4":
            return NumberForm(self.group_size, self.bits, "bf16", "codes")
        kept = SCALE_KINDS.get(self.parts["scales"].dtype)
        if self.bits == _FEW_BITS and self.layout != "whole" and kept is not None:
            zeros: ZeroKind = "middle" if self.has_middle_zeros or "zeros" not in self.parts else "point"
            form = NumberForm(self.group_size, self.bits, kept, zeros)
            if form.rounds_with(self.file_shape[1]):
                return form
        return NumberForm(self.group_size)

    @property
    def input_order(self) -> Tensor | None:
        """int64 ``[in_features]``: the inputs, those of a group side by side; None: they are as they come."""
        return None if self.group_of_input is None else torch.argsort(self.group_of_input, stable=True)


@dataclass(frozen=True, slots=True)
class ZeroBias(StoredTensor):
    """A bias of a quantised layer that is 0: some tools write one for every layer, also where the model has none."""


class _MisfitError(Exception):
    """What is wrong with the tensors of one layer."""


def join_quantized(
    stored: Mapping[str, StoredTensor], how: StoredQuantization, folder: Path, *, is_turned: bool
) -> dict[str, StoredTensor]:
    """The tensors of a folder, each quantised weight as one.

    Args:
        stored: Every tensor of the folder.
        how: What its configuration says.
        folder: For messages.
        is_turned: The model's own checkpoints have rows and columns of dense layers the other way round.

    Raises:
        ModelLoadError: Tensors that do not fit each other; names up to ``MAX_NAMED`` of them.
    """
    names = _PARTS[how.method]
    layers: dict[str, dict[str, StoredTensor]] = {}
    joined: dict[str, StoredTensor] = {}
    num_ignored = 0
    for name, tensor in stored.items():
        layer, _, kind = name.rpartition(".")
        if kind in _OF_ACTIVATIONS:
            num_ignored += 1
        elif kind in names:
            layers.setdefault(layer, {})[kind] = tensor
        else:
            joined[name] = tensor
    problems: list[str] = []
    num_quantized = 0
    with TensorReader(ByteProgress("loading", folder.name, is_shown=False)) as reader:
        for layer, kinds in layers.items():
            if kinds.keys() == {"weight"} and kinds["weight"].dtype in FLOAT_DTYPES:  # as the model computes in it
                joined[kinds["weight"].name] = kinds["weight"]
                continue
            try:
                joined[f"{layer}.weight"] = _joined(layer, kinds, how, reader, is_turned=is_turned)
                num_quantized += 1
                bias = joined.get(f"{layer}.bias")
                if bias is not None and _is_zero(bias, reader):
                    joined[bias.name] = ZeroBias(**{part.name: getattr(bias, part.name) for part in fields(bias)})
            except _MisfitError as misfit:
                problems.append(f"{layer}: {misfit}")
    if problems:
        more = f"; and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else ""
        raise ModelLoadError(
            f"{folder}: these tensors are not valid for {how}: {'; '.join(problems[:MAX_NAMED])}{more}"
        )
    if not num_quantized:
        logger.warning("%s: config.json says %s, but no tensor is quantised that way", folder, how)
    if num_ignored:
        logger.info("%s: ignoring %d scales of activations and of the KV cache", folder.name, num_ignored)
    return joined


def _joined(
    layer: str, kinds: dict[str, StoredTensor], how: StoredQuantization, reader: TensorReader, *, is_turned: bool
) -> QuantizedTensor:
    names = _PARTS[how.method]
    parts: dict[str, StoredTensor] = {}
    for kind, tensor in kinds.items():
        if names[kind] in parts:
            raise _MisfitError(f"{parts[names[kind]].name!r} and {tensor.name!r} both exist")
        parts[names[kind]] = tensor
    needed = ["numbers", "scales", *(["zeros"] if how.needs_zeros or how.method in ("awq", "gptq") else [])]
    missing = [next(kind for kind, part in names.items() if part == what) for what in needed if what not in parts]
    if missing:
        raise _MisfitError(f"it has {', '.join(sorted(kinds))}, but no {' and no '.join(missing)}")
    scale_dtypes = ("U8",) if how.method == "mxfp4" else SCALE_DTYPES
    if parts["scales"].dtype not in scale_dtypes:
        found, wanted = parts["scales"].dtype, " or ".join(scale_dtypes)
        raise _MisfitError(f"{parts['scales'].name!r} has dtype {found}, not {wanted}")
    form = _FORMS["packed" if "weight_packed" in kinds else how.method](parts, how, reader)
    scales = reader.read_whole(parts["scales"])
    if how.method == "mxfp4" and int(scales.max()) > MAX_EXPONENT:
        raise _MisfitError(
            f"{parts['scales'].name!r} has the exponent {int(scales.max())}, but must have at most {MAX_EXPONENT} (255 "
            "stands for NaN, others for weights that are not finite in float32)"
        )
    if not bool(torch.isfinite(scales).all()):
        raise _MisfitError(f"{parts['scales'].name!r} has a scale that is not finite")
    out_features, in_features = form.shape
    groups = _group_of_input(parts.get("groups"), in_features, form.group_size, reader)
    numbers = parts["numbers"]
    return QuantizedTensor(
        numbers.file,
        f"{layer}.weight",
        (in_features, out_features) if is_turned else (out_features, in_features),
        form.name,
        numbers.offset,
        sum(part.nbytes for what, part in parts.items() if what != "shape"),
        is_turned=is_turned,
        parts=parts,
        layout=form.layout,
        bits=form.bits,
        group_size=form.group_size,
        is_whole=form.is_whole and _has_even_groups(groups, form.group_size),
        block=form.block,
        group_of_input=groups,
        is_less_one=how.is_less_one,
        has_middle_zeros=form.layout == "gptq" and form.bits == _FEW_BITS and _are_middle(parts, how, reader),
    )


def _are_middle(parts: Mapping[str, StoredTensor], how: StoredQuantization, reader: TensorReader) -> bool:
    """Whether all zero points of GPTQ's words of 4 bits are 8."""
    nibble = 8 - how.is_less_one
    return _are_all(reader, parts["zeros"], int.from_bytes(bytes([nibble * 17] * 4), "little", signed=True))


@dataclass(frozen=True, slots=True)
class _Form:
    """What the tensors of a layer say: its shape ``(out_features, in_features)`` and how its numbers lie."""

    shape: tuple[int, int]
    name: str
    layout: str
    bits: int
    group_size: int
    is_whole: bool
    block: tuple[int, int] = (0, 0)


def _gptq(parts: Mapping[str, StoredTensor], how: StoredQuantization, reader: TensorReader) -> _Form:
    numbers, bits = _words(parts["numbers"]), how.bits[0]
    per_word = _WORD_BITS // bits
    in_features, out_features = numbers[0] * per_word, numbers[1]
    group = _group(how.group_sizes[0], in_features)
    _expect(parts["scales"], (in_features // group, out_features))
    if out_features % per_word:
        raise _MisfitError(f"{out_features} outputs, but the words of zero points need a multiple of {per_word}")
    _words(parts["zeros"])
    _expect(parts["zeros"], (in_features // group, out_features // per_word))
    is_whole = bits == 4 or _are_all(reader, parts["zeros"], _middle_word(how))
    return _Form((out_features, in_features), f"GPTQ-{bits}", "gptq", bits, group, is_whole)


def _awq(parts: Mapping[str, StoredTensor], how: StoredQuantization, _: TensorReader) -> _Form:
    numbers = _words(parts["numbers"])
    per_word = _WORD_BITS // 4
    in_features, out_features = numbers[0], numbers[1] * per_word
    group = _group(how.group_sizes[0], in_features)
    _expect(parts["scales"], (in_features // group, out_features))
    _words(parts["zeros"])
    _expect(parts["zeros"], (in_features // group, numbers[1]))
    return _Form((out_features, in_features), "AWQ-4", "awq", 4, group, is_whole=True)


def _packed(parts: Mapping[str, StoredTensor], how: StoredQuantization, reader: TensorReader) -> _Form:
    rows, words = _words(parts["numbers"])
    if "shape" not in parts:
        raise _MisfitError("it has weight_packed, but no weight_shape")
    if parts["shape"].shape != (2,) or parts["shape"].dtype not in ("I64", "I32"):
        raise _MisfitError(f"{parts['shape'].name!r} must be 2 integers, got {_described(parts['shape'])}")
    out_features, in_features = (int(size) for size in reader.read_whole(parts["shape"]).tolist())
    fitting = [bits for bits in how.bits if -(-in_features * bits // _WORD_BITS) == words]
    if out_features != rows or in_features < 1 or not fitting:
        raise _MisfitError(
            f"weight_shape says {out_features} x {in_features}, which in {' or '.join(map(str, how.bits))} bits does "
            f"not match the size of {parts['numbers'].name!r} of {_described(parts['numbers'])}"
        )
    bits = fitting[0]
    group = _scale_groups(parts["scales"], how, out_features, in_features)
    zeros, num_groups = parts.get("zeros"), in_features // group
    is_whole = bits == 4
    if zeros is not None and zeros.dtype == "I32":
        _expect(zeros, (-(-out_features * bits // _WORD_BITS), num_groups))
        is_whole = is_whole or _are_all(reader, zeros, int.from_bytes(bytes([128] * 4), "little", signed=True))
    elif zeros is not None:
        is_whole = _check_zeros(zeros, out_features, num_groups, reader) or is_whole
    else:
        is_whole = True
    return _Form((out_features, in_features), f"packed INT{bits}", "packed", bits, group, is_whole)


def _plain(parts: Mapping[str, StoredTensor], how: StoredQuantization, reader: TensorReader) -> _Form:
    """Numbers of 8 bits each, whole or floating."""
    numbers = parts["numbers"]
    if len(numbers.shape) != 2 or 0 in numbers.shape:
        raise _MisfitError(f"{numbers.name!r} is {_described(numbers)}, not a matrix")
    out_features, in_features = numbers.shape
    if numbers.dtype == "F8_E4M3":
        block = _float_block(parts["scales"], how, out_features, in_features)
        return _Form((out_features, in_features), "F8_E4M3", "fp8", 8, 0, is_whole=False, block=block)
    if numbers.dtype != "I8" or how.method == "fp8":
        wanted = "F8_E4M3" if how.method == "fp8" else "I8 or F8_E4M3"
        raise _MisfitError(f"{numbers.name!r} has dtype {numbers.dtype} and a scale, but must have {wanted}")
    group = _scale_groups(parts["scales"], how, out_features, in_features)
    zeros = parts.get("zeros")
    is_whole = zeros is None or _check_zeros(zeros, out_features, in_features // group, reader)
    return _Form((out_features, in_features), "INT8", "whole", 8, group, is_whole)


def _mxfp4(parts: Mapping[str, StoredTensor], _: StoredQuantization, __: TensorReader) -> _Form:
    """Blocks of 32 numbers of 4 bits, and an exponent for each block."""
    numbers = parts["numbers"]
    if numbers.dtype != "U8" or len(numbers.shape) != 3 or 0 in numbers.shape or numbers.shape[2] != MXFP4_BYTES:
        raise _MisfitError(f"{numbers.name!r} is {_described(numbers)}, expected U8 [outputs, groups, {MXFP4_BYTES}]")
    out_features, num_groups, _num_bytes = numbers.shape
    _expect(parts["scales"], (out_features, num_groups))
    group_size = 2 * MXFP4_BYTES
    return _Form((out_features, num_groups * group_size), "MXFP4", "mxfp4", _FEW_BITS, group_size, is_whole=True)


_FORMS: Final[Mapping[str, Callable[[Mapping[str, StoredTensor], StoredQuantization, TensorReader], _Form]]] = {
    "gptq": _gptq,
    "awq": _awq,
    "packed": _packed,
    "compressed-tensors": _plain,
    "fp8": _plain,
    "mxfp4": _mxfp4,
}


def _words(tensor: StoredTensor) -> tuple[int, int]:
    """The shape of a matrix of words."""
    if tensor.dtype != "I32" or len(tensor.shape) != 2 or 0 in tensor.shape:
        raise _MisfitError(f"{tensor.name!r} is {_described(tensor)}, not a matrix of I32")
    return tensor.shape[0], tensor.shape[1]


def _group(size: int, in_features: int) -> int:
    if size == -1 or size == in_features:
        return in_features
    if in_features % size:
        raise _MisfitError(f"groups of {size} do not divide its {in_features} inputs")
    return size


def _scale_groups(scales: StoredTensor, how: StoredQuantization, out_features: int, in_features: int) -> int:
    """Inputs that share a scale, by the shape of the scales: one for all, one per row, or several."""
    if scales.shape in ((), (1,), (1, 1), (out_features,), (out_features, 1)):
        return in_features
    groups = {_group(size, in_features) for size in how.group_sizes if size == -1 or in_features % size == 0}
    if len(scales.shape) != 2 or scales.shape[0] != out_features or in_features % max(scales.shape[1], 1):
        shapes = " or ".join(str([out_features, in_features // group]) for group in sorted(groups)) or "none"
        raise _MisfitError(f"{scales.name!r} is {_described(scales)}, expected {shapes}")
    group = in_features // scales.shape[1]
    if group not in groups:
        sizes = " or ".join(map(str, how.group_sizes))
        raise _MisfitError(f"{scales.name!r} has groups of {group}, but the configuration says {sizes}")
    return group


def _float_block(scales: StoredTensor, how: StoredQuantization, out_features: int, in_features: int) -> tuple[int, int]:
    """Outputs and inputs of FP8 that share a scale."""
    if how.block is not None:
        down, across = how.block
        _expect(scales, (-(-out_features // down), -(-in_features // across)))
        return min(down, out_features), min(across, in_features)
    if scales.shape not in ((), (1,), (1, 1), (out_features,), (out_features, 1)):
        raise _MisfitError(
            f"{scales.name!r} is {_described(scales)}, expected 1 scale or {out_features}, one for each output"
        )
    return 0, 0


def _check_zeros(zeros: StoredTensor, out_features: int, num_groups: int, reader: TensorReader) -> bool:
    """Whether zero points that are numbers of 8 bits are all 0."""
    if zeros.dtype != "I8":
        raise _MisfitError(f"{zeros.name!r} has dtype {zeros.dtype}, not I8 or I32")
    count = 1
    for size in zeros.shape:
        count *= size
    if count not in (1, out_features * num_groups) or zeros.shape[:1] not in ((), (1,), (out_features,)):
        raise _MisfitError(f"{zeros.name!r} is {_described(zeros)}, expected {[out_features, num_groups]}")
    return _are_all(reader, zeros, 0)


def _middle_word(how: StoredQuantization) -> int:
    """Four zero points of 128, as GPTQ has them in a word."""
    return int.from_bytes(bytes([128 - how.is_less_one] * 4), "little", signed=True)


def _are_all(reader: TensorReader, tensor: StoredTensor, value: int) -> bool:
    return bool((reader.read_whole(tensor) == value).all())


def _is_zero(bias: StoredTensor, reader: TensorReader) -> bool:
    return bias.dtype in SCALE_DTYPES and _are_all(reader, bias, 0)


def _expect(tensor: StoredTensor, shape: tuple[int, int]) -> None:
    if tensor.shape != shape:
        raise _MisfitError(f"{tensor.name!r} is {_described(tensor)}, expected {list(shape)}")


def _group_of_input(
    tensor: StoredTensor | None, in_features: int, group_size: int, reader: TensorReader
) -> Tensor | None:
    """The group of each input, where those of a group lie apart."""
    if tensor is None or group_size in (0, in_features):
        return None
    if tensor.dtype not in ("I32", "I64") or tensor.shape != (in_features,):
        raise _MisfitError(f"{tensor.name!r} is {_described(tensor)}, expected I32 {[in_features]}")
    groups = reader.read_whole(tensor).long()
    if bool((groups == -1).all()) or torch.equal(groups, torch.arange(in_features) // group_size):
        return None
    num_groups = in_features // group_size
    low, high = int(groups.min()), int(groups.max())
    if low < 0 or high >= num_groups:
        raise _MisfitError(f"{tensor.name!r} refers to groups {low} to {high}, but there are {num_groups}")
    return groups


def _has_even_groups(groups: Tensor | None, group_size: int) -> bool:
    return groups is None or bool((torch.bincount(groups) == group_size).all())


def _described(tensor: StoredTensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


assert set(SCALE_DTYPES) < set(FLOAT_DTYPES)
