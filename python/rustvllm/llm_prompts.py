"""Prompts and conversations in the shapes that callers of :class:`~rustvllm.llm.LLM` give them, as lists."""

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from rustvllm.engine.request.prompts import PromptType
from rustvllm.exceptions import InvalidRequestError

Prompts = PromptType | Sequence[PromptType]
Messages = Sequence[Mapping[str, Any]]


def as_prompts(prompts: Any) -> list[PromptType]:
    """One prompt or several, as a list; a list of integers, numpy's too, is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]  # type: ignore[list-item]  # its keys are checked with the rest of the request
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Sequence):
        if hasattr(prompts, "tolist"):  # an array of token ids
            return as_prompts(prompts.tolist())
        raise InvalidRequestError(
            f"prompts must be text, token ids, a dict or a list of these, got {type(prompts).__name__}", "prompt"
        )
    if prompts and all(isinstance(item, numbers.Integral) for item in prompts):
        return [prompts]
    return list(prompts)


def with_tokenization(prompts: list[PromptType], options: Mapping[str, Any]) -> list[PromptType]:
    """Text prompts with ``tokenization_kwargs`` of a call; prompts of token ids stay as they are."""
    if unknown := sorted(set(options) - {"add_special_tokens"}):
        raise InvalidRequestError(
            f"tokenization_kwargs may hold add_special_tokens, got {', '.join(map(str, unknown))}",
            "tokenization_kwargs",
        )
    changed: list[Any] = []  # what the dicts hold is checked with the rest of the request
    for prompt in prompts:
        if isinstance(prompt, str):
            changed.append({"prompt": prompt, **options})
        elif isinstance(prompt, Mapping) and "prompt_token_ids" not in prompt:
            changed.append({**options, **prompt})
        else:
            changed.append(prompt)
    return changed


def check_no_media(options: Mapping[str, Any] | None) -> None:
    """Refuse options for media."""
    if options:
        raise InvalidRequestError("mm_processor_kwargs is not supported: prompts are text alone", "mm_processor_kwargs")


def as_conversations(messages: Any) -> list[Messages]:
    """One conversation or several, as a list."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidRequestError("messages must be a non-empty list of messages, or a list of such lists", "messages")
    return [messages] if isinstance(messages[0], Mapping) else list(messages)
