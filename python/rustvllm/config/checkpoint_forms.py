"""In which forms a checkpoint keeps its numbers, and how many it has: from the headers of its files, without torch."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

from rustvllm.config.gguf_file import WHOLE_TYPES, GgufFile, is_gguf
from rustvllm.exceptions import ModelLoadError

MAX_HEADER_BYTES: Final = 256 << 20
_LENGTH_BYTES: Final = 8
_EMBEDDINGS: Final = ("token_embd.weight", "embed_tokens.weight", "wte.weight", "embed_in.weight")
_FUSED: Final = re.compile(r"(blk\.\d+)\.(attn_[qkv]|ffn_gate|ffn_up)\.weight")
"""Maps of GGUF files that are one layer here."""


@dataclass(frozen=True, slots=True)
class StoredForm:
    """A tensor, as far as its size goes.

    Attributes:
        name: As the file has it.
        kind: Its type, as the file has it: ``BF16``, ``Q8_0``.
        num_parameters: Numbers that it holds.
        num_bytes: That it takes in the file.
    """

    name: str
    kind: str
    num_parameters: int
    num_bytes: int

    @property
    def is_embedding(self) -> bool:
        """Whether tokens are looked up in it."""
        return self.name.endswith(_EMBEDDINGS)


def read_forms(path: Path) -> list[StoredForm]:
    """Every tensor of a checkpoint.

    Args:
        path: A GGUF file, or a folder of safetensors.

    Raises:
        ModelLoadError: There are no weights, or a header cannot be read.
    """
    forms = list(_tensors(path))
    if not forms:
        raise ModelLoadError(f"{path} has no *.safetensors and is not a GGUF file, so there are no weights to look at")
    return forms


def resident_bytes(forms: Sequence[StoredForm], item_bytes: int, *, is_tied: bool) -> int:
    """What the weights take on the CPU.

    Whole numbers with scales stay as they are, if all that one layer is fused of is such; everything else is held in
    the model's type, an embedding in any case.

    Args:
        forms: Of the checkpoint.
        item_bytes: Of a number in the model's type.
        is_tied: Whether the embedding is the head, too, for which whole numbers are packed in addition.
    """
    layers: dict[str, list[StoredForm]] = {}
    for form in forms:
        layers.setdefault(_FUSED.sub(_fused_name, form.name), []).append(form)
    total = 0
    for parts in layers.values():
        num_parameters = sum(part.num_parameters for part in parts)
        groups = [WHOLE_TYPES[part.kind] for part in parts if part.kind in WHOLE_TYPES]
        is_whole, is_embedding = len(groups) == len(parts), parts[0].is_embedding
        if not is_whole or is_embedding:
            total += num_parameters * item_bytes
        if is_whole and (is_tied or not is_embedding):
            total += num_parameters + 4 * num_parameters // min(groups)
    return total


def _fused_name(match: re.Match[str]) -> str:
    return f"{match[1]}.{'qkv' if match[2].startswith('attn') else 'gate_up'}"


def _tensors(path: Path) -> Iterator[StoredForm]:
    if is_gguf(path):
        for name, kind, shape, _, _, num_bytes in GgufFile(path).header.tensors():
            yield StoredForm(name, kind, prod(shape), num_bytes)
        return
    for file in sorted(path.glob("*.safetensors")):
        if file.name.startswith("consolidated"):
            continue
        for name, about in _header(file).items():
            if name == "__metadata__":
                continue
            try:
                first, last = about["data_offsets"]
                yield StoredForm(name, str(about["dtype"]), prod(about["shape"]), last - first)
            except (TypeError, KeyError, ValueError) as error:
                raise ModelLoadError(f"{file}: the tensor {name!r:.80} is not described: {error!r:.80}") from error


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
        raise ModelLoadError(f"{file}: not a whole safetensors file: {error}") from error
    return header
