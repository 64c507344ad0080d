"""What a beam search allows: its limits, and the parameters that cannot be combined with it."""

import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from rustvllm.exceptions import InvalidRequestError
from rustvllm.parameter_checks import check_int, shown
from rustvllm.sampling_params.table import SAMPLING_LISTS, SAMPLING_NUMBERS

if TYPE_CHECKING:
    from rustvllm.sampling_params import SamplingParams

MAX_BEAM_WIDTH: Final = 64
MAX_BEAM_STOP_TOKEN_IDS: Final = 8
"""Each makes the search look at another ``n`` candidates of each beam."""
MAX_LENGTH_PENALTY: Final = 100.0

NOT_WITH_BEAMS: Final[Mapping[str, Callable[[Any], bool]]] = {
    **{
        number.name: lambda value, neutral=number.default: value == neutral  # type: ignore[misc]
        for number in SAMPLING_NUMBERS.values()
        if number.name not in ("temperature", "top_k")
    },
    "top_k": lambda v: v in (0, -1),
    "best_of": lambda v: v is None,
    "min_tokens": lambda v: v == 0,
    "stop": lambda v: not v,
    "logprobs": lambda v: v in (None, 0),
    "prompt_logprobs": lambda v: v is None,
    "prompt_logprob_token_ids": lambda v: v is None,
    "prompt_progress": lambda v: not v,
    **dict.fromkeys(SAMPLING_LISTS, operator.not_),
    "logits_processors": lambda v: not v,
    "thinking_token_budget": lambda v: v in (None, -1),
    "repetition_detection": lambda v: v is None or v.numbers is None,
}
"""What a search has no use for: parameter -> whether this value asks for nothing. Its beams are compared by what the
model itself says, and with ``logprobs`` 0 it gives that for the tokens that it chose."""


def check_beams(params: "SamplingParams") -> None:
    """Check what parameters say of a beam search; one that is not wanted has no length penalty.

    Args:
        params: Their types were checked.

    Raises:
        InvalidRequestError: Names the parameter.
    """
    if not params.use_beam_search:
        if params.length_penalty != 1:
            raise InvalidRequestError(
                "only beam search uses length_penalty: set use_beam_search, or leave length_penalty at 1 (got "
                f"{params.length_penalty:g})",
                "length_penalty",
            )
        return
    check_int("n", params.n, 1, MAX_BEAM_WIDTH)
    if not -MAX_LENGTH_PENALTY <= params.length_penalty <= MAX_LENGTH_PENALTY:
        raise InvalidRequestError(
            f"length_penalty must be from -{MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}, got "
            f"{params.length_penalty:g}",
            "length_penalty",
        )
    if not params.is_greedy and params.temperature != 1:
        raise InvalidRequestError(
            f"temperature must be 0 or 1 with use_beam_search, got {params.temperature:g}: beam search compares the "
            "model's own probabilities",
            "temperature",
        )
    if params.output_kind.name == "DELTA":
        raise InvalidRequestError(
            "use_beam_search cannot be streamed, because the best beams are only known at the end",
            "use_beam_search",
        )
    if len(params.stop_token_ids or ()) > MAX_BEAM_STOP_TOKEN_IDS:
        raise InvalidRequestError(
            f"stop_token_ids may have {MAX_BEAM_STOP_TOKEN_IDS} entries with use_beam_search, got "
            f"{len(params.stop_token_ids or ())}",
            "stop_token_ids",
        )
    if params.max_tokens == 0:
        raise InvalidRequestError("max_tokens must be at least 1 with use_beam_search, got 0", "max_tokens")
    if params.structured_outputs is not None:
        param, remedy = params.structured_outputs.asked_by
        raise InvalidRequestError(f"{param} cannot be used with use_beam_search: {remedy}", param)
    for name, is_neutral in NOT_WITH_BEAMS.items():
        if not is_neutral(getattr(params, name)):
            raise InvalidRequestError(
                f"{name} cannot be used with use_beam_search (got {shown(getattr(params, name))}): leave it out", name
            )
