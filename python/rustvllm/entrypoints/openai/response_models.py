"""What the endpoints answer, as pydantic models: for the OpenAPI document alone, which loads them when it is asked for.

Answers are built without them, since a model per chunk would cost more than the chunk. ``scripts/fuzz_api.py`` holds
what the server sends against them.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length", "abort"]


def _absent() -> Any:
    """The default of a field that may be absent, which is another thing than null; nobody makes these models."""
    raise NotImplementedError


class _Answer(BaseModel):
    """Has the listed fields and no others."""

    model_config = ConfigDict(extra="forbid")


class CachedTokens(_Answer):
    """Prompt tokens by where they came from; with ``--enable-prompt-tokens-details``."""

    cached_tokens: int


class Usage(_Answer):
    """Token counts: each prompt once whatever ``n`` is, completion tokens summed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens = Field(default_factory=_absent)


class PromptLogprob(_Answer):
    """One candidate for a place of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(_Answer):
    """Log-probabilities of a choice, one entry per token; null for a first token that nothing comes before."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChunkChoice(_Answer):
    """A choice's news in an event of a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


class CompletionChoice(_Answer):
    """One continuation; choice ``i * n + j`` is sample ``j`` of prompt ``i``."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs = Field(default_factory=_absent)


class _Header(_Answer):
    id: str
    created: int
    model: str
    system_fingerprint: str


class Completion(_Header):
    """Answer of ``POST /v1/completions``."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(_Header):
    """An event of the same, streamed."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: Usage | None = Field(default_factory=_absent)


class TopLogprob(_Answer):
    """A candidate for a token; ``bytes`` is what it adds where its text is half a character."""

    token: str
    logprob: float | None
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token with its likeliest alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Answer):
    """Log-probabilities of a message, one entry per token."""

    content: list[TokenLogprob]


class ChatMessageAnswer(_Answer):
    """What the model said."""

    role: Literal["assistant"]
    content: str


class ChatDelta(_Answer):
    """What an event adds to a message: its role first, then text."""

    role: Literal["assistant"] = Field(default_factory=_absent)
    content: str


class ChatChoice(_Answer):
    """One answer to a conversation."""

    index: int
    message: ChatMessageAnswer
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None


class ChatChunkChoice(_Answer):
    """A choice's news in an event of a stream."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


class ChatCompletion(_Header):
    """Answer of ``POST /v1/chat/completions``."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs = Field(default_factory=_absent)


class ChatCompletionChunk(_Header):
    """An event of the same, streamed."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = Field(default_factory=_absent)


class ModelCard(_Answer):
    """A name under which the model is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    permission: list[Any]


class ModelList(_Answer):
    """Answer of ``GET /v1/models``."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeAnswer(_Answer):
    """Answer of ``POST /tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(_Answer):
    """Answer of ``POST /detokenize``."""

    prompt: str


class ErrorDetails(_Answer):
    """What went wrong: ``param`` names the field of the request, ``code`` repeats the status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorAnswer(_Answer):
    """Every answer that is no success (401 has a short form: ``error`` is the word Unauthorized)."""

    error: ErrorDetails | Literal["Unauthorized"]
