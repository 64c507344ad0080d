"""The answers of ``POST /v1/responses``, as pydantic models: for the OpenAPI document, and for tests.

As those of ``responses.py``, they build nothing when a request is served.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rustvllm.server.schemas.responses import absent


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", defer_build=True)


class ResponseTokenLogprob(_Answer):
    """A token and its log-probability."""

    token: str
    logprob: float | None
    bytes: list[int] | None


class ResponsePlace(ResponseTokenLogprob):
    """A token of the text with the likeliest ones at its place."""

    top_logprobs: list[ResponseTokenLogprob]


class OutputText(_Answer):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field(max_length=0)
    logprobs: list[ResponsePlace] = Field(description="With `include`: one entry per token, else empty.")


class ReasoningText(_Answer):
    """The text of thoughts."""

    type: Literal["reasoning_text"]
    text: str


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class MessageItem(_Answer):
    """What the model says."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText] = Field(max_length=1)


class ReasoningItem(_Answer):
    """What the model thinks."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Any] = Field(max_length=0)
    content: list[ReasoningText] = Field(max_length=1)
    encrypted_content: None


class FunctionCallItem(_Answer):
    """A function that the model calls."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str = Field(description="JSON text; cut short where the answer is.")


class CustomToolCallItem(_Answer):
    """A custom tool that the model calls."""

    id: str
    type: Literal["custom_tool_call"]
    status: ItemStatus
    call_id: str
    name: str
    input: str


OutputItem = Annotated[MessageItem | ReasoningItem | FunctionCallItem | CustomToolCallItem, Field(discriminator="type")]


class InputTokensDetails(_Answer):
    """Tokens of the prompt that cost less."""

    cached_tokens: int = Field(description="Found in the prefix cache.")
    cache_write_tokens: Literal[0]


class OutputTokensDetails(_Answer):
    """Tokens that do not belong to the answer."""

    reasoning_tokens: int = Field(description="Between the marks of the model's thoughts.")


class ResponseUsage(_Answer):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(_Answer):
    """Why a response failed."""

    code: Literal["server_error", "invalid_prompt"]
    message: str


class IncompleteDetails(_Answer):
    """Why a response is cut short."""

    reason: Literal["max_output_tokens"]


class ShownReasoning(_Answer):
    """`reasoning` of the request."""

    effort: str | None
    summary: str | None


class ShownText(_Answer):
    """`text` of the request."""

    format: dict[str, Any]
    verbosity: str


class ResponseObject(_Answer):
    """Answer of ``POST /v1/responses``."""

    id: str
    object: Literal["response"]
    created_at: int = Field(description="Seconds since 1970.")
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    completed_at: int | None
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    background: Literal[False]
    conversation: None
    frequency_penalty: float
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: None
    prompt: None
    prompt_cache_key: str | None
    reasoning: ShownReasoning
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float
    text: ShownText
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str = absent("If it was sent.")


class ResponseEvent(BaseModel):
    """An event of a streamed response; `type` says which other members it has."""

    model_config = ConfigDict(extra="allow", defer_build=True)

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
        "error",
    ]
    sequence_number: int = Field(ge=0, description="From 0 on, without gaps.")
