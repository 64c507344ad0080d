"""Types of sampling in ``rustvllm._core``, where they are found; there is no module of this name."""

from collections.abc import Sequence
from typing import Any, Literal, Self, final

import numpy as np
import numpy.typing as npt

from rustvllm._core._linear import CpuThreads

SAMPLING_NUMBERS: tuple[dict[str, Any], ...]
"""The table of sampling parameters; ``rustvllm.sampling_table`` says what a row has."""
SAMPLING_LISTS: tuple[dict[str, Any], ...]
"""Likewise of those that are lists."""
MAX_PATTERN_SIZE: int
"""Most tokens of a pattern of ``repetition_detection``."""
SAMPLING_FLOAT_COLUMNS: tuple[str, ...]
"""Names of the columns of ``sampling_float``: the floats of the table."""
SAMPLING_INT_COLUMNS: tuple[str, ...]
"""Names of the columns of ``sampling_int``: the integers of the table (``num_logprobs`` and ``num_prompt_logprobs`` -1:
none; ``adapter`` 0: none), then min_tokens, num_prompt_tokens, has_extras (0 or 1)
and num_multimodal."""

@final
class SamplingExtras:
    """Parameters of a request that are lists; immutable, and shared by its samples."""

    def __new__(
        cls,
        *,
        arguments: str | None = None,
        attachment: Any = None,
        prompt_tokens: tuple[int, bool, int, bytes] | None = None,
        **lists: Sequence[Any],
    ) -> Self:
        """Lists of one request, by their names in ``SAMPLING_LISTS``, with entries as ``__getitem__`` gives them.

        ``attachment`` is an object that the worker of an engine in this process understands; ``prompt_tokens`` are as
        the property has them.

        Raises InvalidRequestError naming the parameter, the value and the limit; ``TypeError`` for another name.
        """
    def __getitem__(self, name: str, /) -> list[Any]:
        """The list of this name, empty if it was not given: ids, pairs of id and bias, or lists of 1 to 128 ids.

        Raises ``KeyError`` for a name that is not in ``SAMPLING_LISTS``.
        """
    def outside_vocabulary(self, vocab_size: int) -> tuple[str, int] | None:
        """The first list that holds an id of ``vocab_size`` or more, and the largest of them."""
    @property
    def prompt_tokens(self) -> tuple[int, bool, int, bytes] | None:
        """Tokens that are named for places of the prompt: the first place, whether nothing else is asked of the prompt,
        ids per row, and the rows (int32, −1 pads).
        """
    @property
    def arguments(self) -> str | None:
        """A JSON object for logits processors."""
    @property
    def attachment(self) -> Any: ...

def draw_token_ids(
    threads: CpuThreads,
    logits: npt.NDArray[np.float32],
    rows: npt.NDArray[np.int64],
    uniforms: npt.NDArray[np.float64],
    numbers: dict[str, npt.NDArray[Any]],
) -> list[int]:
    """An id drawn from each of ``rows`` of ``logits``; −1 without a finite distribution.

    ``numbers``: temperature and filters by their names in ``SAMPLING_NUMBERS``, float32 or int64 as the columns are;
    one left out has its default. What equals the smallest logit that is kept is kept too.

    Raises ``TypeError`` for another dtype, ``ValueError`` for another shape, or a row that is not there or given twice.
    """

def mask_logits(
    threads: CpuThreads,
    logits: npt.NDArray[np.float32],
    rows: npt.NDArray[np.int64],
    bitmask: npt.NDArray[np.int32],
) -> None:
    """Make ids minus infinity that ``rows`` of ``logits`` may not take, in place.

    ``bitmask`` is ``[len(rows), ceil(vocab_size / 32)]``; bit ``i % 32`` of word ``i // 32`` is for id ``i``. Raises as
    ``draw_token_ids`` does.
    """

def penalize_logits(
    threads: CpuThreads,
    logits: npt.NDArray[np.float32],
    rows: npt.NDArray[np.int64],
    slots: npt.NDArray[np.int64],
    presence: npt.NDArray[np.float32],
    frequency: npt.NDArray[np.float32],
    repetition: npt.NDArray[np.float32],
    output_counts: npt.NDArray[np.int32],
    prompt_mask: npt.NDArray[np.uint8],
) -> None:
    """Penalize ``rows`` of ``logits`` in place; see ``rustvllm.sample.penalties.apply_penalties``.

    ``slots`` and the three penalties are ``[len(rows)]``; ``output_counts`` and ``prompt_mask`` are ``[capacity,
    vocab_size]``, and a row's slot is its place in them. Raises as ``draw_token_ids`` does, and ``ValueError`` for a
    slot that is not there.
    """

def score_token_ids(
    threads: CpuThreads,
    logits: npt.NDArray[np.float32],
    rows: npt.NDArray[np.int64],
    token_ids: npt.NDArray[np.int64],
    is_normalized: bool,
    ids: npt.NDArray[np.int32],
    values: npt.NDArray[np.float32],
    ranks: npt.NDArray[np.int32],
    log_totals: npt.NDArray[np.float64],
) -> None:
    """Write how likely one token of each of ``rows`` is, and which are the likeliest.

    ``token_ids``, ``ranks`` and ``log_totals`` are ``[len(rows)]``; ``ids`` and ``values`` are ``[len(rows), 1 + k]``:
    the token, then the ``k`` largest logits, of equal ones the first id first. Values are log-probabilities if
    ``is_normalized``, and otherwise logits; a rank is 1 + the number of larger logits, and a total is what is
    subtracted from any logit of the row for its value. Raises as ``draw_token_ids`` does, and ``ValueError`` for an id
    that is not there.
    """

def draw_kernel() -> Literal["avx512", "avx2", "portable"]:
    """What draws on this machine."""
