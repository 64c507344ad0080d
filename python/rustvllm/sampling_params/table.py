"""The tables of sampling parameters: one row per number and per list that a caller may set, as the core has them.

What is to be known of a number (default, range, what it is for) stands in ``crates/scheduler/src/sampling_params.rs``
alone, and of a list (what it holds, its limit) in ``sampling_params/extras.rs``;
``docs/adding-a-sampling-parameter.md`` adds one.
"""

from dataclasses import dataclass
from typing import Final, Literal

from rustvllm import _core


@dataclass(frozen=True, slots=True)
class SamplingNumber:
    """A row of the table.

    Attributes:
        name: Of the parameter, its keyword and its column.
        description: What it means, for callers.
        default: An int or a float, as the parameter is.
        role: ``scale``, ``filter`` (keeps some of the logits, the largest among them), ``penalty``, or ``computed``: no
            caller sets it.
        low: The least value.
        high: The largest value; infinity: there is none.
        is_low_excluded: Whether ``low`` itself is refused.
        is_integer: Whether it is a column of ``sampling_int``; else of ``sampling_float``.
    """

    name: str
    description: str
    default: float
    role: Literal["scale", "filter", "penalty", "computed"]
    low: float
    high: float
    is_low_excluded: bool
    is_integer: bool


@dataclass(frozen=True, slots=True)
class SamplingList:
    """A row of the table of lists.

    Attributes:
        name: Of the parameter, and its keyword.
        description: What it means, for callers.
        kind: ``ids``, ``biases`` (callers map token ids to numbers) or ``words`` (callers give texts, the core has the
            token ids of each).
        max_entries: Most entries, of what callers give and of what the core takes.
    """

    name: str
    description: str
    kind: Literal["ids", "biases", "words"]
    max_entries: int


SAMPLING_NUMBERS: Final = {
    number.name: number
    for number in (SamplingNumber(**row, is_integer=isinstance(row["default"], int)) for row in _core.SAMPLING_NUMBERS)
    if number.role != "computed"
}
"""Those that a caller sets, by name, in the order of the table."""
FILTERS: Final = tuple(number for number in SAMPLING_NUMBERS.values() if number.role == "filter")
PENALTIES: Final = tuple(number for number in SAMPLING_NUMBERS.values() if number.role == "penalty")
MAX_PATTERN_SIZE: Final = _core.MAX_PATTERN_SIZE
"""Most tokens of a pattern of ``repetition_detection``: each token is compared with so many before it."""
SAMPLING_LISTS: Final = {row["name"]: SamplingList(**row) for row in _core.SAMPLING_LISTS}
"""Those that are lists, by name, in the order of the table."""
