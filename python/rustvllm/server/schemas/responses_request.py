"""The body of ``POST /v1/responses``, as pydantic models.

A field that chat completions have, too, is described there. ``endpoints/response_input.py`` makes a conversation of the
body; what a model here does not know is kept in ``model_extra``.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rustvllm.sampling_params import MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from rustvllm.sampling_params.table import SAMPLING_LISTS
from rustvllm.server.schemas.numbers import Float, Int
from rustvllm.server.schemas.protocol import (
    FIRST_ERROR,
    MAX_MESSAGES,
    ChatCompletionRequest,
    Ids,
    Objects,
    Strings,
)

MAX_ITEMS = MAX_MESSAGES - 1
"""Most items of the input; the instructions are a message, too."""


def _as_in_chat(name: str) -> Any:
    """A field with the default and the description that it has in a chat completion."""
    field = ChatCompletionRequest.model_fields[name]
    return Field(
        default=field.default,
        description=field.description,
        json_schema_extra=field.json_schema_extra,
    )


def _field(description: str) -> Any:
    return Field(default=None, description=description)


class InputItem(BaseModel):
    """One item of the input: a message, a call of a tool, what the tool returned, or a thought of the model."""

    model_config = ConfigDict(extra="allow")

    type: str | None = _field(
        "`message` (the default), `reasoning`, `function_call`, `function_call_output`, `custom_tool_call` or "
        "`custom_tool_call_output`."
    )
    role: str | None = _field("Of a message: `user`, `system`, `developer` or `assistant`.")
    content: str | Objects | None = _field("Of a message or of thoughts: a text, or parts: texts and images.")
    summary: Objects | None = _field("Of thoughts; read where they have no content.")
    status: str | None = _field("`in_progress` or `incomplete` on a last message of the assistant: go on with it.")
    call_id: str | None = _field("Which call this is, or is the output of.")
    name: str | None = _field("Of the tool that is called.")
    arguments: str | None = _field("Of the function that is called: JSON text.")
    input: str | None = _field("Of the custom tool that is called.")
    output: str | Objects | None = _field("What the tool returned: a text, or parts: texts and images.")


class ReasoningOptions(BaseModel):
    """How much the model is to think."""

    model_config = ConfigDict(extra="allow")

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = _as_in_chat("reasoning_effort")
    summary: Literal["auto", "concise", "detailed"] | None = _field("Without effect: thoughts are shown as they are.")
    generate_summary: Literal["auto", "concise", "detailed"] | None = _field("The older name of `summary`.")


class TextOptions(BaseModel):
    """What the text of the answer must be."""

    model_config = ConfigDict(extra="allow")

    format: dict[str, Any] | None = _field(
        '`{"type": "text"}`, `{"type": "json_object"}`, or `{"type": "json_schema", "name", "schema"}`.'
    )
    verbosity: Literal["low", "medium", "high"] | None = _field("Without effect.")


class ResponseStreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(extra="allow")

    include_obfuscation: bool | None = _field("Without effect: nothing is added to events.")


class ResponsesRequest(BaseModel):
    """Body of ``POST /v1/responses``."""

    model_config = ConfigDict(extra="allow")

    model: str | None = _as_in_chat("model")
    input: str | Annotated[list[InputItem], FIRST_ERROR, Field(max_length=MAX_ITEMS)] = Field(
        description="The user's text, or the items of a conversation."
    )
    instructions: str | None = _field("A system message before the input.")
    max_output_tokens: Int | None = _field("Most tokens to generate, thoughts included.")
    max_tool_calls: Int | None = _field("Without effect: it is about tools that a server runs.")
    temperature: Float | None = _as_in_chat("temperature")
    top_p: Float | None = _as_in_chat("top_p")
    top_logprobs: Int | None = _field("Candidates to show for each token, if `include` asks for log-probabilities.")
    include: (
        Annotated[
            list[
                Literal[
                    "message.output_text.logprobs",
                    "reasoning.encrypted_content",
                    "message.input_image.image_url",
                    "file_search_call.results",
                    "web_search_call.results",
                    "web_search_call.action.sources",
                    "code_interpreter_call.outputs",
                    "computer_call_output.output.image_url",
                ]
            ],
            FIRST_ERROR,
            Field(max_length=64),
        ]
        | None
    ) = _field("What else to show: `message.output_text.logprobs`. The other names of OpenAI's have no effect.")
    tools: Objects | None = _field("Functions and custom tools that the model may call.")
    tool_choice: str | dict[str, Any] | None = _field(
        "`auto` (the default): text or calls; `required`: calls; `none`: text; the types `function` and `custom`: a "
        "call of this one; the type `allowed_tools`: `auto` or `required` of these."
    )
    parallel_tool_calls: bool | None = _as_in_chat("parallel_tool_calls")
    text: TextOptions | None = _field("What the text must be.")
    reasoning: ReasoningOptions | None = _field("How much the model is to think.")
    stream: bool | None = _as_in_chat("stream")
    stream_options: ResponseStreamOptions | None = _field("Only with `stream`.")
    truncation: Literal["auto", "disabled"] | None = _field(
        "`auto`: cut the beginning of a prompt that is too long and has no images; `disabled` (the default): refuse it."
    )
    store: bool | None = _field("Nothing is stored, whatever this says.")
    metadata: dict[str, Any] | None = _field("Up to 16 texts, which the answer repeats.")
    user: str | None = _as_in_chat("user")
    safety_identifier: str | None = _field("The newer name of `user`, which wins.")
    prompt_cache_key: str | None = _field("Without effect: the prefix cache needs no key.")
    service_tier: str | None = _field("Without effect.")
    background: bool | None = _field("Not supported: a 400 if true.")
    presence_penalty: Float | None = _as_in_chat("presence_penalty")
    frequency_penalty: Float | None = _as_in_chat("frequency_penalty")
    repetition_penalty: Float | None = _as_in_chat("repetition_penalty")
    top_k: Int | None = _as_in_chat("top_k")
    min_p: Float | None = _as_in_chat("min_p")
    seed: Int | None = _as_in_chat("seed")
    stop: str | Annotated[Strings, Field(max_length=MAX_STOP_STRINGS)] | None = _as_in_chat("stop")
    stop_token_ids: Annotated[Ids, Field(max_length=MAX_STOP_TOKEN_IDS)] | None = _as_in_chat("stop_token_ids")
    ignore_eos: bool | None = _as_in_chat("ignore_eos")
    include_stop_str_in_output: bool | None = _as_in_chat("include_stop_str_in_output")
    skip_special_tokens: bool | None = _as_in_chat("skip_special_tokens")
    logit_bias: Annotated[dict[str, Any], Field(max_length=SAMPLING_LISTS["logit_bias"].max_entries)] | None = (
        _as_in_chat("logit_bias")
    )
    structured_outputs: dict[str, Any] | None = _as_in_chat("structured_outputs")
    vllm_xargs: dict[str, Any] | None = _as_in_chat("vllm_xargs")
    chat_template_kwargs: dict[str, Any] | None = _as_in_chat("chat_template_kwargs")
    include_reasoning: bool | None = _as_in_chat("include_reasoning")
    thinking_token_budget: Int | None = _as_in_chat("thinking_token_budget")
    priority: Int | None = _as_in_chat("priority")
    cache_salt: str | None = _as_in_chat("cache_salt")
    request_id: str | None = _as_in_chat("request_id")
