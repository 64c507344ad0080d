"""Prompts and conversations in the shapes that callers of :class:`~rustvllm.llm.LLM` give them, as lists."""

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from rustvllm.engine.request.prompts import PromptType
from rustvllm.exceptions import InvalidRequestError
from rustvllm.sampling_params import BeamSearchParams, SamplingParams

Prompts = PromptType | Sequence[PromptType]
Messages = Sequence[Mapping[str, Any]]
AnyParams = SamplingParams | BeamSearchParams


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


def as_prompts_of_ids(prompts: Any) -> list[PromptType]:
    """One prompt of token ids or several, as a list; what these hold is checked with the rest of the request."""
    for prompt in (prompts, *(prompts if isinstance(prompts, Sequence) else ())):
        if isinstance(prompt, str | Mapping):
            raise InvalidRequestError(
                f"a prompt of token ids must be a list of integers, got {type(prompt).__name__}", "prompt_token_ids"
            )
    return as_prompts(prompts)


def params_of_each(given: Any, num_prompts: int) -> Sequence[Any]:
    """The parameters of each prompt, out of one object for all or a list; what this holds is checked later.

    Raises:
        InvalidRequestError: It is neither, or has another length.
    """
    if isinstance(given, SamplingParams | BeamSearchParams):
        return [given] * num_prompts
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise InvalidRequestError(
            f"sampling_params must be a SamplingParams or a list of them, got {type(given).__name__}",
            "sampling_params",
        )
    if len(given) != num_prompts:
        raise InvalidRequestError(
            f"sampling_params has {len(given)} entries for {num_prompts} prompts; give one, or one per prompt",
            "sampling_params",
        )
    return given


def priority_of_each(given: Any, num_prompts: int) -> Sequence[Any]:
    """The priority of each prompt, out of one for all, a list or None; the numbers are checked later.

    Raises:
        InvalidRequestError: It is none of these, or has another length.
    """
    if given is None or isinstance(given, int):
        return [0 if given is None else given] * num_prompts
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise InvalidRequestError(f"priority must be an integer or a list of integers, got {given!r:.80}", "priority")
    if len(given) != num_prompts:
        raise InvalidRequestError(
            f"priority has {len(given)} entries for {num_prompts} prompts; give one, or one per prompt", "priority"
        )
    return given


def with_tokenization(prompts: list[PromptType], options: Mapping[str, Any]) -> list[PromptType]:
    """Text prompts with ``tokenization_kwargs`` of a call; prompts of token ids stay as they are."""
    if not isinstance(options, Mapping):
        raise InvalidRequestError(
            f"tokenization_kwargs must be a dict, got {type(options).__name__}", "tokenization_kwargs"
        )
    if unknown := sorted(set(options) - {"add_special_tokens"}):
        raise InvalidRequestError(
            f"tokenization_kwargs may only have add_special_tokens, got {', '.join(map(str, unknown))}",
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
        raise InvalidRequestError(
            "mm_processor_kwargs is not supported: prompts can only be text", "mm_processor_kwargs"
        )


def check_chat_options(
    *,
    chat_template: Any,
    chat_template_content_format: Any,
    add_generation_prompt: Any,
    continue_final_message: Any,
    tools: Any,
    chat_template_kwargs: Any,
    tokenization_kwargs: Any,
) -> None:
    """Refuse options of ``LLM.chat`` of the wrong type, as the server does: a template would make a prompt of them.

    Raises:
        InvalidRequestError: Names the option.
    """
    if not isinstance(chat_template, str | None):
        raise InvalidRequestError(f"chat_template must be text, got {type(chat_template).__name__}", "chat_template")
    if chat_template_content_format not in ("auto", "string", "openai"):
        raise InvalidRequestError(
            f"chat_template_content_format must be auto, string or openai, got {chat_template_content_format!r:.80}",
            "chat_template_content_format",
        )
    flags = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise InvalidRequestError(f"{name} must be True or False, got {flag!r:.80}", name)
    dicts = {"chat_template_kwargs": chat_template_kwargs, "tokenization_kwargs": tokenization_kwargs}
    for name, given in dicts.items():
        if not isinstance(given, Mapping | None):
            raise InvalidRequestError(f"{name} must be a dict, got {type(given).__name__}", name)
    if tools is None:
        return
    if isinstance(tools, str) or not isinstance(tools, Sequence):
        raise InvalidRequestError(f"tools must be a list of dicts, got {type(tools).__name__}", "tools")
    if not tools:
        raise InvalidRequestError("tools must not be an empty list; leave it out instead", "tools")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise InvalidRequestError(f"tools[{index}] must be a dict, got {type(tool).__name__}", "tools")


def as_conversations(messages: Any) -> list[Messages]:
    """One conversation or several, as a list."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidRequestError("messages must be a non-empty list of messages, or a list of such lists", "messages")
    return [messages] if isinstance(messages[0], Mapping) else list(messages)
