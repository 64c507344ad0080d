"""Prompts in the shapes that callers of :class:`~rustvllm.llm.LLM` give them, as lists."""

import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rustvllm.engine.request.prompts import PromptType
from rustvllm.exceptions import InvalidRequestError
from rustvllm.parameter_checks import entries_for_each
from rustvllm.sampling_params import BeamSearchParams, SamplingParams

Prompts = PromptType | Iterable[PromptType]
AnyParams = SamplingParams | BeamSearchParams


def as_prompts(prompts: Any) -> list[PromptType]:
    """One prompt or several, as a list; integers, numpy's too, are one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]  # type: ignore[list-item]  # its keys are checked with the rest of the request
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Sequence):
        if hasattr(prompts, "tolist"):  # an array of token ids
            return as_prompts(prompts.tolist())
        if isinstance(prompts, Iterable) and not isinstance(prompts, bytes | bytearray | set | frozenset):
            return as_prompts(list(prompts))  # a generator, say; a set has no order that outputs could have
        raise InvalidRequestError(
            f"prompts must be text, token ids, a dict or a list of these, got {type(prompts).__name__}", "prompt"
        )
    if prompts and all(isinstance(item, numbers.Integral) for item in prompts):
        return [prompts]
    return list(prompts)


def as_prompts_of_ids(prompts: Any) -> list[PromptType]:
    """One prompt of token ids or several, as a list; what these hold is checked with the rest of the request."""
    for prompt in (prompts, *(prompts if isinstance(prompts, Sequence) else ())):
        if isinstance(prompt, str | Mapping):
            raise InvalidRequestError(
                f"a prompt of token ids must be a list of integers, got {type(prompt).__name__}", "prompt_token_ids"
            )
    return as_prompts(prompts)


def params_of_each(given: Any, num_prompts: int, kinds: tuple[type, ...], name: str) -> Sequence[Any]:
    """The parameters of each prompt, out of one object for all or a list (or another iterable); its entries are checked
    later.

    Args:
        given: Of the call.
        num_prompts: How many are needed.
        kinds: Their classes; messages name the first.
        name: The argument's.

    Raises:
        InvalidRequestError: It is neither, or has another length.
    """
    if isinstance(given, kinds):
        return [given] * num_prompts
    return entries_for_each(name, given, num_prompts, f"a {kinds[0].__name__} or a list of them")


def priority_of_each(given: Any, num_prompts: int) -> Sequence[Any]:
    """The priority of each prompt, out of one for all, a list or None; the numbers are checked later.

    Raises:
        InvalidRequestError: It is none of these, or has another length.
    """
    if given is None or isinstance(given, int):
        return [0 if given is None else given] * num_prompts
    return entries_for_each("priority", given, num_prompts, "an integer or a list of integers")


def check_no_media(options: Mapping[str, Any] | None) -> None:
    """Refuse options for media."""
    if options:
        raise InvalidRequestError(
            "mm_processor_kwargs is not supported: images are processed as the model's folder says",
            "mm_processor_kwargs",
        )
