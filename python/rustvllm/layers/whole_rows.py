"""Stored tensors whose numbers are integers with scales, and the common form for the parts of a layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor

from rustvllm.config.checkpoint.whole_forms import NumberForm, common_form

if TYPE_CHECKING:
    from rustvllm._core import PackedLinear

FEW_BITS = 4
MIDDLE_4 = 8
"""The value that 4-bit numbers without zero points or minima store for 0."""


@dataclass(frozen=True, slots=True)
class WholeForm:
    """The form of a stored tensor's integers and scales.

    Attributes:
        numbers: The form of a row's numbers, with its inputs in ``input_order``.
        input_order: int64 ``[in_features]``, the inputs with those of a group next to each other; None if groups are
            contiguous.
    """

    numbers: NumberForm
    input_order: Tensor | None = None


@dataclass(frozen=True, slots=True)
class FileRows:
    """Where a file has the rows of a tensor in blocks.

    Attributes:
        file: The file.
        offset: The offset of the first row.
        row_bytes: Bytes from one row to the next.
        type_name: The type of the blocks.
        interleaved_rows: In each group of this many rows, rows of the first and of the second half alternate; 0 if rows
            are in order.
    """

    file: Path
    offset: int
    row_bytes: int
    type_name: str
    interleaved_rows: int


LayerPlace: TypeAlias = "tuple[PackedLinear, int]"
"""A packed layer, and a tensor's first row in it."""
LayerRows: TypeAlias = "tuple[PackedLinear, int, int, FileRows]"
"""Rows of a packed layer that a file has: the layer, the first row in it, how many, and where they lie."""
TableRows: TypeAlias = tuple[Tensor, FileRows]
"""A table, uint8 ``[rows, bytes of a row]``, and where a file has its rows."""


@dataclass(frozen=True, slots=True)
class StoredWords:
    """A tensor's numbers in words of 32 bits.

    Attributes:
        words: int32, two-dimensional and contiguous.
        layout: The order of numbers in words; see ``_core.PackedLinear.pack_words``.
        bits: Bits of a number.
        less: To be subtracted from each number, if there are no zero points.
        scales: float32 ``[outputs, groups]``.
        zeros: float32 ``[outputs, groups]``, zero points; None if there are none.
        order: The inputs with those of a group next to each other; None if they are in order.
    """

    words: Tensor
    layout: Literal["awq", "gptq", "packed", "mxfp4"]
    bits: int
    less: int
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None


def common_whole_form(parts: Sequence[WholeForm | None]) -> WholeForm | None:
    """The form in which all parts of a layer can be kept; None if there is none."""
    forms = [part for part in parts if part is not None]
    if not forms or len(forms) < len(parts):
        return None
    common = common_form([form.numbers for form in forms])
    if common is None:
        return None
    order = forms[0].input_order
    for form in forms[1:]:
        is_same = order is form.input_order or (
            order is not None and form.input_order is not None and torch.equal(order, form.input_order)
        )
        if not is_same:
            return None
    return WholeForm(common, order)


def common_forms(stored: Iterable[tuple[Tensor, WholeForm | None]]) -> dict[int, WholeForm]:
    """The forms in which layers can be kept whose parts all have integers.

    Args:
        stored: Every stored tensor of the model, with the form of its scales; None if its numbers are not integers.

    Returns:
        The forms by storage, see ``storage_of``; layers without a common form are left out.
    """
    parts: dict[int, list[WholeForm | None]] = {}
    for tensor, form in stored:
        parts.setdefault(storage_of(tensor), []).append(form)
    common = {storage: common_whole_form(forms) for storage, forms in parts.items()}
    return {storage: form for storage, form in common.items() if form is not None}


def described_forms(forms: Iterable[WholeForm]) -> str:
    """How many layers are kept in which bits and group sizes."""
    counts = Counter((form.numbers.bits, form.numbers.group_size) for form in forms)
    return ", ".join(f"{count} in {bits} bits, groups of {group}" for (bits, group), count in counts.most_common())


def rows_in_form(
    form: NumberForm, in_features: int, numbers: Tensor, scales: Tensor, zeros: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Convert rows of a part to the form of its layer.

    Args:
        form: The layer's form: its groups may be smaller, and it may have zero points that the part does not need.
        in_features: Numbers in a row.
        numbers: int8 ``[rows, in_features]``; of codes what they stand for.
        scales: float32 ``[rows, groups of the part]``.
        zeros: float32 ``[rows, groups of the part]``, zero points to be subtracted from the numbers; None if there are
            none.

    Returns:
        Numbers, scales and zeros, with the groups of the form; zeros are None if it has none.
    """
    num_groups = -(-in_features // form.group_size)
    if scales.shape[1] < num_groups:  # another part has smaller groups
        repeats = num_groups // scales.shape[1]
        scales = scales.repeat_interleave(repeats, dim=1)
        zeros = None if zeros is None else zeros.repeat_interleave(repeats, dim=1)
    if form.zeros == "middle" and zeros is not None:
        points = zeros.to(torch.int8).repeat_interleave(form.group_size, dim=1)
        return numbers - points, scales, None
    if form.zeros not in ("middle", "codes") and zeros is None:
        middle = MIDDLE_4 if form.bits == FEW_BITS else 0
        return numbers + middle, scales, torch.full_like(scales, middle)
    return numbers, scales, zeros


def first_row_of(part: Tensor, width: int) -> int:
    """A part's first row in its whole tensor, whose rows have ``width`` numbers."""
    return int(part.storage_offset()) // width


def storage_of(tensor: Tensor) -> int:
    """A number that is the same for all views of one memory, also on the meta device, which has no addresses."""
    identity: int = tensor.untyped_storage()._cdata  # noqa: SLF001 -- there is no public name
    return identity
