"""Stored tensors whose numbers are whole ones with scales: how the parts of a layer are kept in one form."""

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
"""What numbers of 4 bits are counted from where they have neither zero points nor minima."""


@dataclass(frozen=True, slots=True)
class WholeForm:
    """How a stored tensor's whole numbers have their scales.

    Attributes:
        numbers: Of a row in the order of its inputs.
        input_order: int64 ``[in_features]``, the inputs with those of a group side by side; None: they are neighbours.
    """

    numbers: NumberForm
    input_order: Tensor | None = None


@dataclass(frozen=True, slots=True)
class FileRows:
    """Where the rows of a tensor in blocks lie.

    Attributes:
        file: Which.
        offset: Of the first row.
        row_bytes: From one to the next.
        type_name: Of the blocks.
        interleaved_rows: Of so many rows those of the first half and of the second lie in turns; 0: they have their
            order.
    """

    file: Path
    offset: int
    row_bytes: int
    type_name: str
    interleaved_rows: int


LayerPlace: TypeAlias = "tuple[PackedLinear, int]"
"""A packed layer, and the first row there of a tensor."""
LayerRows: TypeAlias = "tuple[PackedLinear, int, int, FileRows]"
"""Rows of a packed layer out of a file: the layer, the first row there, how many, and where they lie."""
TableRows: TypeAlias = tuple[Tensor, FileRows]
"""A table, uint8 ``[rows, bytes of a row]``, and where its rows lie in a file."""


@dataclass(frozen=True, slots=True)
class StoredWords:
    """The numbers of a tensor in words of 32 bits.

    Attributes:
        words: int32, two-dimensional and contiguous.
        layout: How numbers lie in them; see ``_core.PackedLinear.pack_words``.
        bits: Of a number.
        less: What each is more than the number that it stands for, where that has no zero point.
        scales: float32 ``[outputs, groups]``.
        zeros: float32 ``[outputs, groups]``, zero points; None: there are none.
        order: The inputs, those of a group side by side; None: they are as they come.
    """

    words: Tensor
    layout: Literal["awq", "gptq", "packed"]
    bits: int
    less: int
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None


def common_whole_form(parts: Sequence[WholeForm | None]) -> WholeForm | None:
    """The form in which all parts of a layer can be kept; None: there is none."""
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
    """How layers can be kept whose parts all have whole numbers.

    Args:
        stored: Every stored tensor of the model, with how its numbers have scales; None: they are not whole ones.

    Returns:
        By storage, see ``storage_of``; what has no such form is left out.
    """
    parts: dict[int, list[WholeForm | None]] = {}
    for tensor, form in stored:
        parts.setdefault(storage_of(tensor), []).append(form)
    common = {storage: common_whole_form(forms) for storage, forms in parts.items()}
    return {storage: form for storage, form in common.items() if form is not None}


def described_forms(forms: Iterable[WholeForm]) -> str:
    """How many layers are kept in which bits and groups."""
    counts = Counter((form.numbers.bits, form.numbers.group_size) for form in forms)
    return ", ".join(f"{count} in {bits} bits, groups of {group}" for (bits, group), count in counts.most_common())


def rows_in_form(
    form: NumberForm, in_features: int, numbers: Tensor, scales: Tensor, zeros: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows of a part as the form of its layer has them.

    Args:
        form: Of the layer: its groups may be smaller, and it may have zero points that the part does not need.
        in_features: Of a row.
        numbers: int8 ``[rows, in_features]``.
        scales: float32 ``[rows, groups of the part]``.
        zeros: Likewise, zero points that the numbers are counted from; None: they are counted from 0 already.

    Returns:
        The same with the groups of the form; zeros None where it has none.
    """
    num_groups = -(-in_features // form.group_size)
    if scales.shape[1] < num_groups:  # another part has smaller groups
        repeats = num_groups // scales.shape[1]
        scales = scales.repeat_interleave(repeats, dim=1)
        zeros = None if zeros is None else zeros.repeat_interleave(repeats, dim=1)
    if form.zeros == "middle" and zeros is not None:
        points = zeros.to(torch.int8).repeat_interleave(form.group_size, dim=1)
        return numbers - points, scales, None
    if form.zeros != "middle" and zeros is None:
        middle = MIDDLE_4 if form.bits == FEW_BITS else 0
        return numbers + middle, scales, torch.full_like(scales, middle)
    return numbers, scales, zeros


def first_row_of(part: Tensor, width: int) -> int:
    """The first row of a part in the tensor whose rows of ``width`` numbers it is some of."""
    return int(part.storage_offset()) // width


def storage_of(tensor: Tensor) -> int:
    """The same for all views of one memory, which on the meta device has no address."""
    identity: int = tensor.untyped_storage()._cdata  # noqa: SLF001 -- there is no public name
    return identity
