"""The shapes in which a caller may give a prompt."""

from collections.abc import Sequence
from typing import TypedDict

from rustvllm import _core

PROMPT_KEYS = frozenset({"prompt", "prompt_token_ids", "cache_salt", "add_special_tokens", "prediction"})


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
