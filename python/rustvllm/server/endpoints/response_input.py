"""What ``POST /v1/responses`` asks for, as a chat completion: items become messages, and fields get chat's names.

All that is checked here is about the body as it was sent; :func:`in_their_words` renames what the chat pipeline says of
the rest.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

from pydantic import PrivateAttr

from rustvllm.exceptions import InvalidRequestError
from rustvllm.parameter_checks import shown
from rustvllm.server.endpoints.message_images import image_part
from rustvllm.server.schemas.protocol import ChatCompletionRequest, ChatMessage
from rustvllm.server.schemas.refusals import RESPONSES_REFUSALS
from rustvllm.server.schemas.request_body import refuse_unbuilt
from rustvllm.server.schemas.responses_request import InputItem, ResponsesRequest

LOGPROBS: Final = "message.output_text.logprobs"
CUSTOM_INPUT: Final = "input"
"""The one argument of the function that a custom tool is for the model."""
MAX_METADATA: Final = 16
MAX_METADATA_KEY_CHARS, MAX_METADATA_VALUE_CHARS = 64, 512
_SAME_IN_CHAT = (
    "model",
    "temperature",
    "top_p",
    "parallel_tool_calls",
    "stream",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "logit_bias",
    "structured_outputs",
    "vllm_xargs",
    "chat_template_kwargs",
    "include_reasoning",
    "thinking_token_budget",
    "priority",
    "cache_salt",
    "request_id",
)
_PARTS: Final = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_MEDIA_PARTS = ("input_file", "input_audio", "image_url", "file")
_ROLES = ("user", "system", "developer", "assistant")
_ITEMS = (
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
)
_FORMATS = ("text", "json_object", "json_schema")
_SCHEMA_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_CUSTOM_PARAMETERS: Final = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}
_OF_CHAT: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "functions": "tools",
}
"""Fields of chat completions, which would be ignored here as any unknown field, and what they are called."""
_PARAMS: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
    "truncate_prompt_tokens": "truncation",
    "logprobs": "include",
    "image_url": "input",
    "prompt": "input",
}
_WORDS: Final = (
    (".function.", "."),
    ("function.name", "name"),
    ("tool_choice.allowed_tools.", "tool_choice."),
    ("tool_choice.allowed_tools must", "tool_choice must"),
    ("response_format", "text.format"),
    ("max_tokens", "max_output_tokens"),
    ("set truncate_prompt_tokens", "set truncation to auto"),
    ("truncate_prompt_tokens", "truncation"),
    ("reasoning_effort", "reasoning.effort"),
)


class AskedResponse(ChatCompletionRequest):
    """A chat completion that stands for a response.

    Attributes:
        asked: The body that it was made of.
    """

    _asked: ResponsesRequest = PrivateAttr()

    @property
    def asked(self) -> ResponsesRequest:
        """The body that it was made of."""
        return self._asked

    def asked_by(self, body: ResponsesRequest) -> Self:
        """Note the body."""
        self._asked = body
        return self


def as_chat(body: ResponsesRequest) -> AskedResponse:
    """A body as a chat completion; grows with it.

    Raises:
        InvalidRequestError: A field is wrong, or asks for what this server does not have; the message names it as the
            client sent it.
    """
    for name, other in _OF_CHAT.items():
        if (body.model_extra or {}).get(name) is not None:
            raise InvalidRequestError(f"{name} is a field of chat completions; a response has {other}.", name)
    refuse_unbuilt(body, RESPONSES_REFUSALS)
    _check_metadata(body.metadata)
    if body.stream_options is not None and not body.stream and body.stream_options.model_fields_set:
        raise InvalidRequestError("stream_options can only be used with stream=true.", "stream_options")
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME_IN_CHAT if name in body.model_fields_set}
    tools = [_tool(index, tool) for index, tool in enumerate(body.tools or ())]
    if tools:
        fields["tools"] = tools
    if body.tool_choice is not None and (tools or body.tool_choice not in ("auto", "none")):
        fields["tool_choice"] = _tool_choice(body.tool_choice)
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = _response_format(body.text.format)
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if LOGPROBS in (body.include or ()):
        fields.update(logprobs=True, top_logprobs=body.top_logprobs)
    request = AskedResponse(
        messages=_messages(body),
        continue_final_message=_is_left_open(body.input) or None,
        max_tokens=body.max_output_tokens,
        truncate_prompt_tokens=-1 if body.truncation == "auto" else None,
        user=body.safety_identifier if body.safety_identifier is not None else body.user,
        **fields,
    )
    return request.asked_by(body)


def in_their_words(error: InvalidRequestError) -> InvalidRequestError:
    """What the chat pipeline says of a request, with the names of the fields that it was made of."""
    message = str(error)
    for chat, responses in _WORDS:
        message = message.replace(chat, responses)
    return InvalidRequestError(message, _PARAMS.get(error.param or "", error.param))


def custom_names(body: ResponsesRequest) -> frozenset[str]:
    """Names of the custom tools, once they have been checked."""
    return frozenset(tool["name"] for tool in body.tools or () if tool.get("type") == "custom")


def _check_metadata(metadata: Mapping[str, Any] | None) -> None:
    if metadata is None:
        return
    if len(metadata) > MAX_METADATA:
        raise InvalidRequestError(f"metadata has {len(metadata)} entries; the limit is {MAX_METADATA}.", "metadata")
    for name, value in metadata.items():
        if len(name) > MAX_METADATA_KEY_CHARS:
            raise InvalidRequestError(
                f"metadata has the key {name[:32]!r}… of {len(name)} characters; the limit is "
                f"{MAX_METADATA_KEY_CHARS}.",
                "metadata",
            )
        if not isinstance(value, str) or len(value) > MAX_METADATA_VALUE_CHARS:
            raise InvalidRequestError(
                f"metadata[{name!r}] must be a text of at most {MAX_METADATA_VALUE_CHARS} characters, got "
                f"{shown(value)}.",
                "metadata",
            )


# -- items --------------------------------------------------------------------------------------------------------


def _messages(body: ResponsesRequest) -> list[ChatMessage]:
    """The conversation; what the assistant thought, said and called in a row is one message."""
    messages = []
    if body.instructions:
        messages.append(ChatMessage(role="system", content=body.instructions))
    if isinstance(body.input, str):
        messages.append(ChatMessage(role="user", content=body.input))
        return messages
    if not body.input:
        raise InvalidRequestError("input must not be an empty list: send a text, or one item or more.", "input")
    turn: ChatMessage | None = None
    for index, item in enumerate(body.input):
        where, kind = f"input[{index}]", _kind(index, item)
        if kind == "reasoning":
            thought = _thought(where, item)
            if thought:
                turn = _add(messages, ChatMessage(role="assistant", reasoning=thought))  # type: ignore[call-arg]
        elif kind in ("function_call", "custom_tool_call"):
            if turn is None:
                turn = _add(messages, ChatMessage(role="assistant"))
            call = _call(where, item, is_custom=kind == "custom_tool_call")
            if turn.tool_calls is None:
                turn.tool_calls = [call]
            else:
                turn.tool_calls.append(call)
        elif kind != "message":
            if item.call_id is None:
                raise InvalidRequestError(f"{where}.call_id is required: it says which call has this output.", "input")
            turn = None
            messages.append(
                ChatMessage(
                    role="tool",
                    content=_content(f"{where}.output", item.output, is_required=True),
                    tool_call_id=item.call_id,
                )
            )
        else:
            content = _content(f"{where}.content", item.content, is_required=True)
            if item.role != "assistant":
                turn = None
                messages.append(ChatMessage(role=item.role or "", content=content))
            elif turn is None or turn.content is not None or turn.tool_calls:
                turn = _add(messages, ChatMessage(role="assistant", content=content))
            else:
                turn.content = content
    if not messages:
        raise InvalidRequestError(
            "input holds nothing that the model could read: its reasoning items have neither content nor summary.",
            "input",
        )
    return messages


def _add(messages: list[ChatMessage], message: ChatMessage) -> ChatMessage:
    messages.append(message)
    return message


def _kind(index: int, item: InputItem) -> str:
    kind = "message" if item.type is None and item.role is not None else item.type
    if kind == "item_reference":
        raise InvalidRequestError(
            f"input[{index}] is an item_reference, but this server stores no items: send the item itself.", "input"
        )
    if kind not in _ITEMS:
        raise InvalidRequestError(
            f"input[{index}].type must be one of {', '.join(_ITEMS)}, got {shown(kind)}.", "input"
        )
    if kind == "message" and item.role not in _ROLES:
        raise InvalidRequestError(
            f"input[{index}].role must be one of {', '.join(_ROLES)}, got {shown(item.role)}.", "input"
        )
    return kind


def _thought(where: str, item: InputItem) -> str:
    """The text of thoughts: what they were, else what they are in short; empty if only their author can read them."""
    if isinstance(item.content, str):
        return item.content
    for name, parts in (("content", item.content), ("summary", item.summary)):
        texts = []
        for number, part in enumerate(parts or ()):
            text = part.get("text")
            if not isinstance(text, str):
                raise InvalidRequestError(f"{where}.{name}[{number}] must have a string as its 'text'.", "input")
            texts.append(text)
        if any(texts):
            return "\n".join(texts)
    return ""


def _content(where: str, content: str | Sequence[Mapping[str, Any]] | None, *, is_required: bool) -> Any:
    """A text, or parts: texts and images."""
    if isinstance(content, str):
        return content
    if content is None and is_required:
        raise InvalidRequestError(f"{where} is required: a text, or a list of parts.", "input")
    return [_part(f"{where}[{number}]", part) for number, part in enumerate(content or ())]


def _part(where: str, part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind == "input_image":
        return _image(where, part)
    if kind in _MEDIA_PARTS:
        raise InvalidRequestError(
            f"{where} has the type {kind!r}, which is not supported yet; send texts as input_text, and images as "
            "input_image.",
            "input",
        )
    key = _PARTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise InvalidRequestError(
            f"{where}.type must be input_text, input_image, output_text or refusal, got {shown(kind)}.", "input"
        )
    text = part.get(key)
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where} must have a string as its {key!r}.", "input")
    return {"type": "text", "text": text}


def _image(where: str, part: Mapping[str, Any]) -> dict[str, Any]:
    url = part.get("image_url")
    if part.get("file_id") is not None:
        raise InvalidRequestError(
            f"{where}.file_id names a file, and this server stores none: send the image itself as image_url, "
            "data:image/png;base64,...",
            "input",
        )
    if not isinstance(url, str):
        raise InvalidRequestError(
            f'{where}.image_url must be a string, "data:image/png;base64,...", got {shown(url)}.', "input"
        )
    return image_part(url, f"{where}.image_url")


def _call(where: str, item: InputItem, *, is_custom: bool) -> dict[str, Any]:
    """A call that the model made, as chat has it."""
    arguments = item.input if is_custom else item.arguments
    given = {"call_id": item.call_id, "name": item.name, "input" if is_custom else "arguments": arguments}
    for name, value in given.items():
        if value is None:
            raise InvalidRequestError(f"{where}.{name} is required.", "input")
    if is_custom:
        arguments = json.dumps({CUSTOM_INPUT: arguments}, ensure_ascii=False)
    return {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": arguments}}


def _is_left_open(items: str | Sequence[InputItem]) -> bool:
    """Whether the model is to go on with its last message, which was cut short."""
    if isinstance(items, str) or not items:
        return False
    last = items[-1]
    return last.role == "assistant" and last.status in ("in_progress", "incomplete")


# -- tools and formats --------------------------------------------------------------------------------------------


def _tool(index: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as chat has it."""
    where, kind = f"tools[{index}]", tool.get("type")
    if kind not in ("function", "custom"):
        raise InvalidRequestError(
            f"{where}.type must be function or custom, got {shown(kind)}: this server runs no tools of its own; "
            "describe yours as a function, and send back what it returns.",
            "tools",
        )
    description = tool.get("description")
    if description is not None and not isinstance(description, str):
        raise InvalidRequestError(f"{where}.description must be a text, got {shown(description)}.", "tools")
    function = {
        name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None
    }
    if kind == "custom":
        form = tool.get("format")
        if form is not None and (not isinstance(form, Mapping) or form.get("type") != "text"):
            raise InvalidRequestError(
                f"{where}.format must have the type text, got {shown(form)}: grammars for custom tools are not "
                "supported yet; describe the tool as a strict function.",
                "tools",
            )
        function["parameters"] = _CUSTOM_PARAMETERS
    return {"type": "function", "function": function}


def _tool_choice(choice: str | Mapping[str, Any]) -> str | dict[str, Any]:
    """The choice as chat has it."""
    if isinstance(choice, str):
        if choice in ("none", "auto", "required"):
            return choice
    elif choice.get("type") in ("function", "custom"):
        return {"type": "function", "function": {"name": choice.get("name")}}
    elif choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        if isinstance(tools, list):
            for number, tool in enumerate(tools):
                kind = tool.get("type") if isinstance(tool, Mapping) else shown(tool)
                if kind not in (None, "function", "custom"):
                    raise InvalidRequestError(
                        f"tool_choice.tools[{number}] must be an object of the type function or custom, with a name, "
                        f"got {shown(tool)}.",
                        "tool_choice",
                    )
            tools = [{"type": "function", "function": tool} for tool in tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    raise InvalidRequestError(
        "tool_choice must be none, auto, required, or an object of type function, custom (both with name) or "
        f"allowed_tools (with mode and tools), got {shown(choice)}.",
        "tool_choice",
    )


def _response_format(asked: Mapping[str, Any]) -> dict[str, Any]:
    """``text.format`` as chat has it."""
    kind = asked.get("type")
    if kind not in _FORMATS:
        raise InvalidRequestError(f"text.format.type must be one of {', '.join(_FORMATS)}, got {shown(kind)}.", "text")
    if kind != "json_schema":
        return {"type": kind}
    name, schema, strict = asked.get("name"), asked.get("schema"), asked.get("strict")
    if not isinstance(name, str) or not _SCHEMA_NAME.fullmatch(name):
        raise InvalidRequestError(
            f"text.format.name must have 1 to 64 characters out of A-Z a-z 0-9 _ -, got {shown(name)}.", "text"
        )
    if not isinstance(schema, Mapping | bool):
        raise InvalidRequestError(
            f"text.format.schema must be an object or a boolean, got {type(schema).__name__}.", "text"
        )
    description = asked.get("description")
    if description is not None and not isinstance(description, str):
        raise InvalidRequestError(f"text.format.description must be a text, got {shown(description)}.", "text")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequestError(f"text.format.strict must be true or false, got {shown(strict)}.", "text")
    return {"type": kind, "json_schema": {"name": name, "schema": schema, "strict": strict}}
