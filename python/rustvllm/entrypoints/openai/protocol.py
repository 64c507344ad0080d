"""The requests that the endpoints take, as pydantic models.

A field the models do not know is kept in ``model_extra``: refused if it asks for something that is not built
(``refusals.py``), else ignored with a line in the log. Ranges of sampling parameters are checked by ``SamplingParams``.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, FailFast, WithJsonSchema

MAX_CHOICES = 16384
"""Most choices (prompts × n) of one request."""


class _FirstError(FailFast):
    """Stops at a list's first wrong element: a million of them must not cost a million messages.

    Hashable, which pydantic's own class is not and unions of annotated types must be.
    """

    __hash__ = object.__hash__


_FIRST_ERROR = _FirstError()
Ids = Annotated[list[int], _FIRST_ERROR]
Strings = Annotated[list[str], _FIRST_ERROR]
Objects = Annotated[list[dict[str, Any]], _FIRST_ERROR]

_PROMPT_SCHEMA = {
    "description": "Text, a list of texts, token ids, or a list of lists of token ids.",
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
            "minItems": 1,
        },
    ],
}


def _kind(value: Any) -> str:
    """The JSON name of a value's type, for messages."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def _is_ids(value: list[Any]) -> bool:
    return set(map(type, value)) == {int}  # one pass in C; bool is a type of its own here


def parse_prompts(value: Any) -> list[str | list[int]]:
    """The four shapes of ``prompt`` as one list of texts and token-id lists.

    Written by hand rather than as a union of types: a wrong element in a list of a million ids must cost one message,
    not a million. Emptiness and the range of ids are checked later, where the tokenizer is known.

    Raises:
        ValueError: Another shape; says which element is wrong.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError(f"must be a string, a list of strings, token ids, or a list of those, not {_kind(value)}")
    if not value:
        raise ValueError("must not be an empty list")
    if _is_ids(value):
        return [value]
    if len(value) > MAX_CHOICES:
        raise ValueError(f"has {len(value)} elements that are prompts of their own; one request may have {MAX_CHOICES}")
    prompts: list[str | list[int]] = []
    for index, item in enumerate(value):
        if isinstance(item, str) or (isinstance(item, list) and (not item or _is_ids(item))):
            prompts.append(item)
        elif isinstance(item, list):
            wrong = next(element for element in item if type(element) is not int)
            raise ValueError(f"element {index} must hold integer token ids only, but holds {_kind(wrong)}")
        else:
            raise ValueError(f"element {index} is {_kind(item)}, expected a string or token ids")
    if len({type(prompt) for prompt in prompts}) > 1:
        raise ValueError("must not mix strings and token ids")
    return prompts


def _none_if_false(value: Any) -> Any:
    return None if value is False else value


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GenerationRequest(BaseModel):
    """What completions and chat completions have in common."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Strings | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: dict[str, Any] | None = None
    allowed_token_ids: Ids | None = None
    bad_words: Strings | None = None
    vllm_xargs: dict[str, Any] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    prompt: Annotated[Any, AfterValidator(parse_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
    logprobs: Annotated[int | None, BeforeValidator(_none_if_false)] = None
    echo: bool | None = False
    suffix: str | None = None


class ChatMessage(BaseModel):
    """One message of a conversation; further fields reach the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | Objects | None = None
    name: str | None = None
    tool_calls: Objects | None = None
    tool_call_id: str | None = None


class Conversation(BaseModel):
    """Messages, and how they become a prompt."""

    model_config = ConfigDict(extra="allow")

    messages: Annotated[list[ChatMessage], _FIRST_ERROR]
    tools: Objects | None = None
    documents: Objects | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatCompletionRequest(GenerationRequest, Conversation):
    """Body of ``POST /v1/chat/completions``."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tool_choice: str | dict[str, Any] | None = None


class TokenizeRequest(BaseModel):
    """Body of ``POST /tokenize`` with a text; with ``messages`` it is a :class:`TokenizeChatRequest`."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False


class TokenizeChatRequest(Conversation):
    """Body of ``POST /tokenize`` with a conversation."""

    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(BaseModel):
    """Body of ``POST /detokenize``."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    tokens: Ids
