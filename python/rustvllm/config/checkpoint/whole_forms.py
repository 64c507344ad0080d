"""How the whole numbers of a quantised weight have their scales, as files have them and as the CPU keeps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

ScaleKind = Literal["f32", "f16", "bf16", "two-level"]
"""How scales are kept; in two levels as Q4_K and Q6_K have them: 16 bits for 256 numbers, times 8 bits per group."""
ZeroKind = Literal["middle", "point", "minimum", "codes"]
"""What numbers are counted from: 0 (of 4 bits 8, of 6 bits 32), a zero point of each group, or 0, less a minimum; or 0,
where 4 bits are codes of whole numbers from -12 to 12, as in MXFP4."""
SCALE_KINDS: Final[Mapping[str, ScaleKind]] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
"""Of the types that folders have scales in."""
_SCALE_BYTES: Final = {"f32": 4, "f16": 2, "bf16": 2}
_BLOCK: Final = 32
_SMALL_BLOCK: Final = 16
_LEVEL_NUMBERS: Final = 256
_WHOLE_BYTE: Final = 8


@dataclass(frozen=True, slots=True)
class NumberForm:
    """See the module.

    Attributes:
        group_size: How many numbers of a row share a scale.
        bits: Of a number, as it is kept: 4, 6 (in groups of 16 without minima) or 8.
        scales: How scales are kept.
        zeros: What numbers are counted from.
    """

    group_size: int
    bits: int = 8
    scales: ScaleKind = "f32"
    zeros: ZeroKind = "middle"

    def num_bytes(self, num_outputs: int, num_inputs: int) -> int:
        """What a weight takes in this form, without what its last panel lacks."""
        groups = -(-num_inputs // self.group_size)
        if self.scales == "two-level":
            levels = 1 if self.zeros == "middle" else 2
            each = num_inputs // _LEVEL_NUMBERS * levels * (2 + _LEVEL_NUMBERS // self.group_size)
        else:
            size = _SCALE_BYTES[self.scales]
            each = groups * (size + {"point": 1, "minimum": size}.get(self.zeros, 0))
        return num_outputs * (num_inputs * self.bits // 8 + each)

    def rounds_with(self, num_inputs: int) -> bool:
        """Whether activations can be rounded in blocks that do not cross groups, as 4 bits need in any case."""
        is_small = self.group_size == _SMALL_BLOCK and self.bits in (6, 8)
        return is_small or self.group_size % _BLOCK == 0 or self.group_size >= num_inputs

    def as_multiplied(self, num_inputs: int, *, round_activations: bool) -> NumberForm:
        """How the CPU keeps it: numbers of 8 bits that meet activations as they are have scales of 32 bits, which the
        products and the matrix unit read in place.

        Args:
            num_inputs: Of the layer.
            round_activations: Whether activations are rounded to 8 bits where that can be.
        """
        is_plain = self.bits == _WHOLE_BYTE and self.zeros == "middle" and self.scales != "two-level"
        if not is_plain or (round_activations and self.rounds_with(num_inputs)):
            return self
        return replace(self, scales="f32")


def common_form(parts: Sequence[NumberForm]) -> NumberForm | None:
    """The form in which all parts of a layer can be kept; None: their groups do not fit each other.

    Parts that differ in more than their groups are kept in 8 bits; with minima if one part counts from other than the
    middle. Scales stay in two levels where all parts have them so, and in 16 bits where all have these and no minima;
    else they have 32 bits.
    """
    smallest = min(form.group_size for form in parts)
    if any(form.group_size % smallest for form in parts):
        return None
    first = parts[0]
    if all(form == first for form in parts):
        return first
    # What codes stand for is whole numbers of 8 bits, counted from 0.
    parts = [replace(form, bits=_WHOLE_BYTE, zeros="middle") if form.zeros == "codes" else form for form in parts]
    first = parts[0]
    scales = {form.scales for form in parts}
    if scales == {"two-level"}:
        return NumberForm(smallest, _WHOLE_BYTE, "two-level", "minimum")
    zeros, bits = {form.zeros for form in parts}, {form.bits for form in parts}
    if len(bits) == len(zeros) == 1 and "two-level" not in scales and smallest % _BLOCK == 0:
        return NumberForm(smallest, first.bits, first.scales if len(scales) == 1 else "f32", first.zeros)
    if zeros != {"middle"}:
        return NumberForm(smallest, _WHOLE_BYTE, "f32", "minimum")
    is_narrow = len(scales) == 1 and "two-level" not in scales and smallest % _BLOCK == 0
    return NumberForm(smallest, _WHOLE_BYTE, first.scales if is_narrow else "f32")
