"""The shapes in which a caller may give a prompt."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypedDict

from rustvllm import _core
from rustvllm.exceptions import InvalidRequestError

PROMPT_KEYS = frozenset({"prompt", "prompt_token_ids", "cache_salt", "add_special_tokens", "prediction"})

UNBUILT_KEYS: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "media_io_kwargs"), "prompts can only be text"
    ),
    "prompt_embeds": "give text or token ids",
    "token_type_ids": "models that generate text take none",
    "prompt_token_offsets": "nothing needs the places of tokens in the text",
    "encoder_prompt": "models have no encoder; give the whole prompt as 'prompt'",
    "decoder_prompt": "models have no encoder; give the whole prompt as 'prompt'",
}
"""vLLM's other keys, and why they are refused; one that is None or empty is let through."""


class TextPrompt(TypedDict, total=False):
    """A prompt as text; ``add_special_tokens`` (default True) lets the tokenizer add its beginning of sequence.

    ``prediction`` is what the answer is expected to be: with speculative decoding an answer that follows it is faster.
    """

    prompt: str
    cache_salt: str
    add_special_tokens: bool
    prediction: str | Sequence[int] | None


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids, optionally with the text they stand for."""

    prompt_token_ids: Sequence[int] | _core.TokenIds
    prompt: str
    cache_salt: str
    prediction: str | Sequence[int] | None


PromptType = str | Sequence[int] | TextPrompt | TokensPrompt


def with_tokenization(prompts: list[PromptType], options: Mapping[str, Any]) -> list[PromptType]:
    """Text prompts with ``tokenization_kwargs`` of a call; prompts of token ids stay as they are.

    Raises:
        InvalidRequestError: An option is not known.
    """
    if not isinstance(options, Mapping):
        raise InvalidRequestError(
            f"tokenization_kwargs must be a dict, got {type(options).__name__}", "tokenization_kwargs"
        )
    if unknown := sorted(map(str, set(options) - {"add_special_tokens"})):
        raise InvalidRequestError(
            f"tokenization_kwargs may only have add_special_tokens, got {', '.join(unknown)}",
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
