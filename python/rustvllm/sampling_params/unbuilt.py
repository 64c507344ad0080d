"""Sampling parameters of vLLM that the engine cannot honour yet, each with what works instead."""

import operator
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from rustvllm.exceptions import InvalidRequestError
from rustvllm.parameter_checks import shown

NOT_SUPPORTED_YET: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    # parameter -> values that ask for nothing, the default first; what works instead of any other
    "routed_experts_prompt_start": ((0,), "outputs do not say which experts were used"),
    "trace_decode_token_ids": ((None,), 'drafts are made of {"prompt": ..., "prediction": ...}'),
    "watermarking": ((None, False), "a logits processor can mark what is sampled"),
}
"""Parameters that vLLM has and the engine cannot honour yet."""

_NAMES: Final = frozenset(
    {
        "all_stop_token_ids",
        "bad_words_token_ids",
        "eos_token_id",
        "for_sampler_warmup",
        "update_from_generation_config",
        "update_from_tokenizer",
        "verify",
    }
)
"""vLLM's engines call these; here the engine's own copy has what follows from the model and the tokenizer."""

unbuilt_values: Final = operator.itemgetter(*NOT_SUPPORTED_YET)
"""Their values, of all parameters of a request by name."""
UNBUILT_DEFAULTS: Final = tuple(neutral[0] for neutral, _ in NOT_SUPPORTED_YET.values())
"""What these values are in nearly all requests."""


def check_unbuilt(given: Mapping[str, Any]) -> None:
    """Refuse parameters that ask for what is not built.

    Args:
        given: All parameters of a request, by name.

    Raises:
        InvalidRequestError: Names the parameter, its value and what works instead.
    """
    for name, (neutral, remedy) in NOT_SUPPORTED_YET.items():
        value = given[name]
        if value is not neutral[0] and not any(type(value) is type(one) and value == one for one in neutral):
            raise InvalidRequestError(f"{name} is not supported yet (got {shown(value)}): {remedy}", name)


def refuse_name(owner: object, name: str) -> NoReturn:
    """Say of a name of vLLM's ``SamplingParams`` why it is not there.

    Raises:
        AttributeError: Always.
    """
    if name in _NAMES:
        raise AttributeError(
            f"SamplingParams.{name} is not supported yet: an engine takes what follows from the model and the "
            "tokenizer into a copy of its own",
            name=name,
            obj=owner,
        )
    raise AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}", name=name, obj=owner)
