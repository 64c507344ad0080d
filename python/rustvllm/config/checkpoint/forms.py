"""Reads the formats and sizes of a checkpoint's tensors from the headers of its files, without torch."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Final

from rustvllm.config.checkpoint.gguf_file import WHOLE_TYPES, GgufFile, is_gguf
from rustvllm.config.checkpoint.lfs_pointer import what_to_do
from rustvllm.config.checkpoint.quantized_folders import StoredQuantization, refuse_undescribed
from rustvllm.config.checkpoint.weight_files import INDEX_NAME, weight_files
from rustvllm.config.checkpoint.whole_forms import SCALE_KINDS, NumberForm, common_form
from rustvllm.exceptions import ModelLoadError

MAX_HEADER_BYTES: Final = 256 << 20
_LENGTH_BYTES: Final = 8
_EMBEDDINGS: Final = ("token_embd.weight", "embed_tokens.weight", "wte.weight", "embed_in.weight")
_FUSED: Final = re.compile(
    r"(blk\.\d+\.|.*layers\.\d+\.(?:\w+\.)+)"
    r"(?:(attn_[qkv]|[qkv]_proj)|ffn_gate|ffn_up|ffn_gate_exps|ffn_up_exps|gate_proj|up_proj|w1|w3)\.weight"
)
"""Maps of checkpoints that are one layer here."""
_EXPERT: Final = re.compile(
    r"(?:.*\.experts\.\d+\..*|blk\.\d+\.ffn_\w+_exps)\.weight|.*\.mlp\.experts\.(?:gate_up|down)_proj"
)
"""Maps of experts, of one or of all of a layer."""
_HEADS: Final = ("output.weight", "lm_head.weight")
_POSITIONS: Final = ("position_embd.weight", "wpe.weight", "embed_positions.weight")
_WORD_BITS: Final = 32
_FEW_BITS: Final = 4
_BLOCK: Final = 32
_MXFP4: Final = NumberForm(32, 4, "bf16", "codes")
_STACK: Final = re.compile(r"(.*\.mlp\.experts\.(?:gate_up|down)_proj)_(blocks|scales)")
"""Parts of all experts of a layer in MXFP4."""
_NUMBERS: Final = ("qweight", "weight_packed", "weight")
_SCALES: Final = ("scales", "weight_scale", "weight_scale_inv")
_ZEROS: Final = ("qzeros", "weight_zero_point")
_REST: Final = ("g_idx", "weight_g_idx", "weight_shape", "input_scale", "input_zero_point", "output_scale")


@dataclass(frozen=True, slots=True)
class StoredForm:
    """A tensor, as far as its size goes.

    Attributes:
        name: As the file has it.
        kind: Its type, as the file has it: ``BF16``, ``Q8_0``.
        num_parameters: Numbers that it holds.
        num_bytes: That it takes in the file.
        form: How its numbers are kept on the CPU, if they stay whole ones; else None.
    """

    name: str
    kind: str
    num_parameters: int
    num_bytes: int
    form: NumberForm | None = None

    @property
    def is_embedding(self) -> bool:
        """Whether tokens are looked up in it."""
        return self.name.endswith(_EMBEDDINGS)


def read_forms(path: Path, how: StoredQuantization | None = None) -> list[StoredForm]:
    """Every tensor of a checkpoint, a quantised weight as one.

    Args:
        path: A GGUF file, or a folder of safetensors.
        how: The folder's weights were quantised by other tools.

    Raises:
        ModelLoadError: There are no weights, a header cannot be read, or the weights are parts of quantised ones and
            ``how`` is None.
    """
    forms = list(_tensors(path))
    if not forms:
        raise ModelLoadError(f"{path} has no *.safetensors files and is not a GGUF file, so it has no weights")
    if how is not None:
        return _joined(forms, how)
    if not is_gguf(path):
        refuse_undescribed({form.name: form.kind for form in forms}, path)
    return forms


_NARROW_BYTES: Final = 2


@dataclass(frozen=True, slots=True)
class KeptLayer:
    """What is one layer on the CPU, perhaps of several tensors, in the form in which it is kept.

    Attributes:
        num_parameters: Numbers that it holds.
        form: How whole numbers have their scales; None: they are floating-point numbers.
        item_bytes: Of a number in floating point.
        is_read: Whether every token reads all of it: an embedding that is not the head is looked up in.
        stored_bytes: What it takes, if it stays as it is stored: such an embedding in blocks does.
        chosen_share: The share that a token reads, if it does: of experts it reads those that are chosen for it.
    """

    num_parameters: int
    form: NumberForm | None
    item_bytes: int
    is_read: bool
    stored_bytes: int | None = None
    chosen_share: float = 1.0

    @property
    def num_bytes(self) -> int:
        """What it takes, without what its last panel lacks."""
        if self.stored_bytes is not None:
            return self.stored_bytes
        if self.form is None:
            return self.num_parameters * self.item_bytes
        return self.form.num_bytes(1, self.num_parameters)  # rows are whole groups


def kept_layers(
    forms: Sequence[StoredForm], item_bytes: int, *, round_activations: bool = True, chosen_share: float = 1.0
) -> list[KeptLayer]:
    """What the weights become on the CPU.

    Whole numbers with scales stay as they are, if all that one layer is fused of is such, and so do layers and
    embeddings in 16 bits; everything else is held in the model's type.

    Args:
        forms: Of the checkpoint.
        item_bytes: Of a number in the model's type.
        round_activations: Whether activations are rounded to 8 bits where that can be.
        chosen_share: The share of a layer's experts that compute a token.
    """
    is_tied = not any(form.name in _HEADS for form in forms)
    layers: dict[str, list[StoredForm]] = {}
    for form in forms:
        layers.setdefault(_FUSED.sub(_fused_name, form.name), []).append(form)
    kept: list[KeptLayer] = []
    for parts in layers.values():
        found = [part.form for part in parts if part.form is not None]
        common = common_form(found) if len(found) == len(parts) else None
        is_narrow = item_bytes > _NARROW_BYTES and {part.kind for part in parts} in ({"BF16"}, {"F16"})
        is_looked_up = parts[0].name.endswith(_POSITIONS) or (parts[0].is_embedding and not is_tied)
        count = sum(part.num_parameters for part in parts)
        if common is not None:  # rows are whole groups, so nothing of this depends on how long they are
            common = common.as_multiplied(count, round_activations=round_activations)
        stays = is_looked_up and parts[0].kind in WHOLE_TYPES
        stored = sum(part.num_bytes for part in parts) if stays else None
        share = chosen_share if _EXPERT.fullmatch(parts[0].name) else 1.0
        item = _NARROW_BYTES if is_narrow else item_bytes
        kept.append(KeptLayer(count, common, item, not is_looked_up, stored, share))
    return kept


def _fused_name(match: re.Match[str]) -> str:
    return f"{match[1]}{'gate_up' if match[2] is None else 'qkv'}"


def _joined(forms: Sequence[StoredForm], how: StoredQuantization) -> list[StoredForm]:
    """The tensors of a quantised folder, those of one weight as one form."""
    layers: dict[str, dict[str, StoredForm]] = {}
    joined: list[StoredForm] = []
    if how.method == "mxfp4":
        return _joined_stacks(forms)
    for form in forms:
        layer, _, kind = form.name.rpartition(".")
        if kind in (*_NUMBERS, *_SCALES, *_ZEROS, *_REST):
            layers.setdefault(layer, {})[kind] = form
        else:
            joined.append(form)
    for layer, kinds in layers.items():
        numbers = next((kinds[kind] for kind in _NUMBERS if kind in kinds), None)
        scales = next((kinds[kind] for kind in _SCALES if kind in kinds), None)
        if numbers is None or scales is None:
            joined += kinds.values()
            continue
        bits = how.bits[0]
        count = numbers.num_parameters * _WORD_BITS // bits if numbers.kind == "I32" else numbers.num_parameters
        has_zeros = any(kind in kinds for kind in _ZEROS)
        # Of 8 bits with zero points it depends on these, which are not read here.
        is_whole = numbers.kind != "F8_E4M3" and ((numbers.kind == "I32" and bits == 4) or not has_zeros)
        joined.append(
            replace(
                numbers,
                name=f"{layer}.weight",
                kind=numbers.kind if numbers.kind != "I32" else f"{how.method} {bits} bits",
                num_parameters=count,
                num_bytes=sum(form.num_bytes for form in kinds.values()),
                form=_form_of(count, scales, 4 if numbers.kind == "I32" and bits == 4 else 8, has_zeros)
                if is_whole
                else None,
            )
        )
    return joined


def _joined_stacks(forms: Sequence[StoredForm]) -> list[StoredForm]:
    """The tensors of a folder in MXFP4: blocks of two numbers to a byte, with their exponents."""
    stacks: dict[str, dict[str, StoredForm]] = {}
    joined: list[StoredForm] = []
    for form in forms:
        if (match := _STACK.fullmatch(form.name)) is None:
            joined.append(form)
        else:
            stacks.setdefault(match[1], {})[match[2]] = form
    for name, parts in stacks.items():
        if parts.keys() != {"blocks", "scales"}:
            joined += parts.values()
            continue
        num_bytes = sum(part.num_bytes for part in parts.values())
        joined.append(StoredForm(name, "MXFP4", 2 * parts["blocks"].num_parameters, num_bytes, _MXFP4))
    return joined


def _form_of(count: int, scales: StoredForm, bits: int, has_zeros: bool) -> NumberForm:
    form = NumberForm(max(count // max(scales.num_parameters, 1), 1))
    kept = SCALE_KINDS.get(scales.kind)
    if bits == _FEW_BITS and kept is not None and form.group_size % _BLOCK == 0:
        return NumberForm(form.group_size, bits, kept, "point" if has_zeros else "middle")
    return form


def _tensors(path: Path) -> Iterator[StoredForm]:
    if is_gguf(path):
        for name, kind, shape, _, _, num_bytes in GgufFile(path).header.tensors():
            yield StoredForm(name, kind, prod(shape), num_bytes, WHOLE_TYPES.get(kind))
        return
    if not (path / INDEX_NAME).is_file() and not any(path.glob("*.safetensors")):
        return
    files: dict[str, Path] = {}
    for file in weight_files(path):
        end, header = 0, _header(file)
        for name, about in header.items():
            if name == "__metadata__":
                continue
            if (other := files.setdefault(name, file)) != file:
                raise ModelLoadError(f"{path}: tensor {name!r} is in {other.name} and in {file.name}")
            try:
                first, last = about["data_offsets"]
                end = max(end, last)
                yield StoredForm(name, str(about["dtype"]), prod(about["shape"]), last - first)
            except (TypeError, KeyError, ValueError) as error:
                raise ModelLoadError(
                    f"{file}: the header describes the tensor {name!r:.80} wrongly: {error!r:.80}"
                ) from error
        _check_length(file, end)


def _check_length(file: Path, end: int) -> None:
    """Refuse a file that has ended before its last tensor does, which is ``end`` bytes behind its header."""
    with file.open("rb") as opened:
        needed = _LENGTH_BYTES + int.from_bytes(opened.read(_LENGTH_BYTES), "little") + end
    size = file.stat().st_size
    if size < needed:
        raise ModelLoadError(
            f"{file}: not a complete safetensors file: it has {size} bytes, but its header describes {needed}; it is "
            "truncated or damaged, download it again"
        )


def _header(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            if length > min(MAX_HEADER_BYTES, file.stat().st_size):
                raise ValueError(f"its header takes {length} bytes")
            header = json.loads(opened.read(length))
            if not isinstance(header, dict):
                raise ValueError("its header is not a JSON object")
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file}: not a complete safetensors file: {error}{what_to_do(file)}") from error
    return header
