"""``prompt_logprob_token_ids``: rows of token ids for the places of a prompt, checked and made into one array."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rustvllm.exceptions import InvalidRequestError
from rustvllm.parameter_checks import shown
from rustvllm.sampling_params.list_checks import MAX_TOKEN_ID

PromptTokenIds = npt.NDArray[np.int32]
NAME: Final = "prompt_logprob_token_ids"
MAX_PROMPT_TOKEN_IDS: Final = (3 << 20) // 4
"""Most ids of all rows together, padding included: the core carries 3 MiB of lists for a request."""


def prompt_token_rows(value: object) -> PromptTokenIds:
    """The rows as an array that nothing changes, int32 ``[num_rows, num_ids]``; −1 pads.

    Args:
        value: A list of lists, of which shorter ones are padded, or an array of integers.

    Raises:
        InvalidRequestError: Neither of these, too many, or what is no token id.
    """
    if isinstance(value, np.ndarray):
        if value.dtype == np.int32 and value.base is None and not value.flags.writeable and value.ndim == 2:
            return value  # checked before
        if value.ndim != 2 or value.dtype.kind not in "iu":
            raise _wrong(f"an array of {value.dtype} with {value.ndim} dimensions")
        _check_counts(*value.shape)
        low, high = int(value.min()), int(value.max())
        if low < -1 or high > MAX_TOKEN_ID:
            raise _outside(low if low < -1 else high)
        made = value.astype(np.int32, order="C")
    else:
        made = _of_lists(value)
    made.flags.writeable = False
    return made


def _of_lists(value: object) -> PromptTokenIds:
    if not _is_list(value):
        raise _wrong(f"{shown(value)} ({type(value).__name__})")
    rows: Sequence[Any] = value  # type: ignore[assignment]  # it is a list
    for row in rows:
        if not _is_list(row):
            raise _wrong(f"the row {shown(row)} ({type(row).__name__})")
    width = max(map(len, rows), default=0)
    _check_counts(len(rows), width)
    made = np.full((len(rows), width), -1, np.int32)
    for index, row in enumerate(rows):
        for token_id in row:
            if isinstance(token_id, bool) or not isinstance(token_id, int | np.integer):
                raise _wrong(f"{shown(token_id)} ({type(token_id).__name__}) in row {index}")
            if not -1 <= token_id <= MAX_TOKEN_ID:
                raise _outside(token_id)
        made[index, : len(row)] = row
    return made


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def _check_counts(num_rows: int, width: int) -> None:
    if not num_rows or not width:
        raise InvalidRequestError(
            f"{NAME} must name a token at least, got {num_rows} rows of at most {width} ids: leave it out to name none",
            NAME,
        )
    if num_rows * width > MAX_PROMPT_TOKEN_IDS:
        raise InvalidRequestError(
            f"{NAME} has {num_rows} rows of {width} ids; the limit is {MAX_PROMPT_TOKEN_IDS} ids together: name fewer "
            "for each place",
            NAME,
        )


def _wrong(got: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{NAME} must be a list of lists of token ids, or an array of integers with two dimensions, got {got}", NAME
    )


def _outside(token_id: object) -> InvalidRequestError:
    return InvalidRequestError(
        f"{NAME} must hold token ids from 0 to {MAX_TOKEN_ID}, and -1 to pad a row, got {shown(token_id)}", NAME
    )
