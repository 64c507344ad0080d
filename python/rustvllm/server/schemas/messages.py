"""Anthropic's Messages API: the bodies that its endpoints take, and their answers for the OpenAPI document."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rustvllm.sampling_params import MAX_STOP_STRINGS
from rustvllm.server.schemas.numbers import Float, Int
from rustvllm.server.schemas.protocol import FIRST_ERROR, MAX_MESSAGES, Objects, Strings, described

CONTENT = "Text, or a list of blocks."


class InputMessage(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="allow")

    role: Literal["user", "assistant", "system"]
    content: str | Objects = Field(description=CONTENT)


class CountTokensRequest(BaseModel):
    """Body of ``POST /v1/messages/count_tokens``: what becomes the prompt."""

    model_config = ConfigDict(extra="allow")

    model: str | None = described("A name by which this server serves its model; left out: the first of them.")
    messages: Annotated[list[InputMessage], FIRST_ERROR] = Field(
        max_length=MAX_MESSAGES, json_schema_extra={"minItems": 1}
    )
    system: str | Objects | None = described("Text, or a list of text blocks, that comes before the messages.")
    tools: Objects | None = described("Tools that the model may call: `name`, `description`, `input_schema`, `strict`.")
    tool_choice: dict[str, Any] | None = described(
        "`type` `auto` (the default): text or calls; `any`: calls; `tool` with `name`: a call of this one; `none`: "
        "text. `disable_parallel_tool_use`: one call at most."
    )
    thinking: dict[str, Any] | None = described(
        "`type` `enabled` with `budget_tokens`, `adaptive`, `between_tools`, or `disabled`; the default is the chat "
        "template's. `display` `omitted` leaves thoughts out of the answer."
    )
    output_config: dict[str, Any] | None = described(
        "`effort`, for the chat template; `format`: `type` `json_schema` and `schema`, which the answer obeys."
    )
    context_management: dict[str, Any] | None = described(
        "`edits` of the `type` `clear_thinking_20251015`: whose thoughts to leave out; no other edits."
    )
    chat_template_kwargs: dict[str, Any] | None = described("Further variables for the chat template.")


class MessagesRequest(CountTokensRequest):
    """Body of ``POST /v1/messages``."""

    max_tokens: Int = Field(
        description="Most tokens to generate; more than fit behind the prompt are as many as fit.",
        json_schema_extra={"minimum": 1},
    )
    stop_sequences: Annotated[Strings, Field(max_length=MAX_STOP_STRINGS)] | None = described(
        "Strings that end the answer, which is cut before them."
    )
    stream: bool | None = described("Answer with server-sent events.", False)
    temperature: Float | None = described("0: greedy.", minimum=0)
    top_p: Float | None = described("Sample from the likeliest tokens that have this probability together.")
    top_k: Int | None = described("Sample from so many tokens.")
    seed: Int | None = described("64 bits; not of Anthropic's API.", minimum=-(2**63), maximum=2**63 - 1)
    metadata: dict[str, Any] | None = described(
        "`user_id`: with `--scheduling-policy fair`, shares what its API key gets with the key's other users."
    )
    priority: Int | None = described("Lower is sooner; needs `--scheduling-policy priority` unless 0.")
    cache_salt: str | None = described(
        "Share cached blocks only with requests of the same salt.", minLength=1, maxLength=128
    )
    request_id: str | None = described("Part of the answer's id; the header `X-Request-Id` wins.", maxLength=256)


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", defer_build=True)


class CountTokensResponse(_Answer):
    """How long the prompt is."""

    input_tokens: int


class TextBlock(_Answer):
    """What the model says."""

    type: Literal["text"]
    text: str
    citations: None


class ThinkingBlock(_Answer):
    """What the model thought."""

    type: Literal["thinking"]
    thinking: str
    signature: str = Field(description="Empty: nothing is signed.")


class ToolUseBlock(_Answer):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(_Answer):
    """Token counts."""

    input_tokens: int = Field(description="Of the prompt, without those found in the prefix cache if these are shown.")
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int = Field(description="0 without `--enable-prompt-tokens-details`.")


class MessageResponse(_Answer):
    """The answer to a conversation."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: (
        Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"] | None
    ) = Field(description="null: the answer was aborted.")
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(BaseModel):
    """An event of a stream: `message_start`, `content_block_start`, `_delta` and `_stop`, `message_delta`, `_stop`."""

    model_config = ConfigDict(extra="allow", defer_build=True)

    type: str


class MessageError(_Answer):
    """What went wrong."""

    type: Literal["error"]
    error: dict[str, str]
