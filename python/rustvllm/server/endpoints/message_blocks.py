"""A body of Anthropic's Messages API as the chat request that asks for the same.

Messages of blocks become messages of text, images, calls and results; a conversation that ends with the assistant's
words is gone on with. What cannot be done is refused in the words of the body.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rustvllm.exceptions import InvalidRequestError
from rustvllm.parameter_checks import shown
from rustvllm.server.endpoints.message_images import image_part
from rustvllm.server.schemas.messages import CountTokensRequest, InputMessage, MessagesRequest
from rustvllm.server.schemas.protocol import ChatCompletionRequest, ChatMessage
from rustvllm.server.schemas.refusals import MESSAGES_REFUSALS
from rustvllm.server.schemas.request_body import refuse_unbuilt

_CHOICES: Final = {"auto": None, "any": "required", "none": "none"}
_PASSED_ON: Final = ("temperature", "top_p", "top_k", "seed", "priority", "cache_salt", "request_id", "stream")
_MEDIA_TYPES: Final = ("image/jpeg", "image/png", "image/gif", "image/webp")
_BLOCKS: Final = {
    "user": "text, image or tool_result",
    "assistant": "text, thinking, redacted_thinking or tool_use",
    "system": "text",
}
_CLEAR_THINKING: Final = "clear_thinking_20251015"
_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def chat_request(body: CountTokensRequest) -> ChatCompletionRequest:
    """The chat request of a body.

    Raises:
        InvalidRequestError: Names the field as the body has it.
    """
    refuse_unbuilt(body, MESSAGES_REFUSALS)
    fields: dict[str, Any] = {"model": body.model, "messages": _messages(body)}
    if (num_turns := _turns_with_thoughts(body.context_management)) is not None:
        _forget_thoughts(fields["messages"], num_turns)
    last = fields["messages"][-1]
    if last.role == "assistant" and not last.tool_calls:
        if any(part["text"] for part in _parts(last)) or _thoughts(last):
            fields.update(add_generation_prompt=False, continue_final_message=True)  # it has begun to answer
        else:
            fields["messages"].pop()
    if body.tools:
        fields["tools"] = [_tool(f"tools[{index}]", tool) for index, tool in enumerate(body.tools)]
    fields |= _choice(body.tool_choice) | _output(body.output_config)
    if isinstance(body, MessagesRequest):
        if body.max_tokens < 1:
            raise InvalidRequestError(f"max_tokens must be at least 1, got {body.max_tokens}.", "max_tokens")
        fields |= {name: value for name in _PASSED_ON if (value := getattr(body, name)) is not None}
        fields |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences or None, "user": _user(body.metadata)}
    thinking, variables = _thinking(body.thinking, has_tools=bool(body.tools))
    fields |= thinking
    if variables or body.chat_template_kwargs:
        fields["chat_template_kwargs"] = {**variables, **(body.chat_template_kwargs or {})}
    return ChatCompletionRequest.model_construct(**fields)


def _messages(body: CountTokensRequest) -> list[ChatMessage]:
    if not body.messages:
        raise InvalidRequestError("messages must not be empty.", "messages")
    messages: list[ChatMessage] = []
    if system := _content("system", body.system or "", "system"):
        messages.append(_message("system", system))
    for index, message in enumerate(body.messages):
        for made in _of_message(f"messages[{index}]", message):
            before = messages[-1] if messages else None
            # As Anthropic has it, turns of the same role are one turn.
            if before is not None and before.role == made.role != "tool":
                _join(before, made)
            else:
                messages.append(made)
    return messages


def _message(role: str, parts: list[dict[str, Any]], **more: Any) -> ChatMessage:
    """A message with parts; a single text is shown as it is."""
    is_text = len(parts) == 1 and parts[0]["type"] == "text"
    content = parts[0]["text"] if is_text else (parts or None)
    return ChatMessage.model_construct(role=role, content=content, **more)


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _join(message: ChatMessage, other: ChatMessage) -> None:
    """Put what another message of the same role says behind a message."""
    message.content = [*_parts(message), *_parts(other)] or None
    message.tool_calls = [*(message.tool_calls or ()), *(other.tool_calls or ())] or None
    if thoughts := [thought for thought in (_thoughts(message), _thoughts(other)) if thought]:
        message.reasoning = "\n".join(thoughts)  # type: ignore[attr-defined]


def _thoughts(message: ChatMessage) -> str | None:
    return (message.model_extra or {}).get("reasoning")


def _forget_thoughts(messages: Sequence[ChatMessage], num_turns: int) -> None:
    """Leave out thoughts of the assistant but for its last turns that have some; results of tools end no turn."""
    is_counted = False
    for message in reversed(messages):
        if message.role == "user":
            is_counted = False
        elif _thoughts(message):
            if not is_counted:
                num_turns -= 1
            is_counted = True
            if num_turns < 0 and message.model_extra is not None:
                del message.model_extra["reasoning"]


def _parts(message: ChatMessage) -> list[dict[str, Any]]:
    content = message.content
    return [_text(content)] if isinstance(content, str) else list(content or ())


def _of_message(where: str, message: InputMessage) -> list[ChatMessage]:
    """A message of blocks: the results that it has, then what it says."""
    if isinstance(message.content, str):
        return [_message(message.role, [_text(message.content)])]
    results: list[ChatMessage] = []
    parts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(message.content):
        at, kind = f"{where}.content[{number}]", block.get("type")
        if kind == "text":
            parts.append(_text(_string(at, block, "text")))
        elif kind == "image" and message.role == "user":
            parts.append(_image(at, block))
        elif kind == "tool_result" and message.role == "user":
            results.append(_result(at, block))
        elif kind == "tool_use" and message.role == "assistant":
            calls.append(_call(at, block))
        elif kind == "thinking" and message.role == "assistant":
            thoughts.append(_string(at, block, "thinking"))
        elif kind == "redacted_thinking" and message.role == "assistant":
            continue  # only the server that wrote it can read it
        else:
            raise _wrong_block(at, kind, message.role)
    if message.role == "user":
        return [*results, _message("user", parts)] if parts or not results else results
    if message.role == "system":
        return [_message("system", parts)] if parts else []
    more: dict[str, Any] = {"tool_calls": calls} if calls else {}
    if thoughts:
        more["reasoning"] = "\n".join(thoughts)
    return [_message("assistant", parts, **more)]


def _result(at: str, block: Mapping[str, Any]) -> ChatMessage:
    """What a tool returned. Templates have no place for the sign of an error, so its text begins with one."""
    said = _content(f"{at}.content", block.get("content") or "", "messages", takes_images=True)
    is_error = block.get("is_error")
    if is_error is not None and not isinstance(is_error, bool):
        raise InvalidRequestError(f"{at}.is_error must be true or false, got {shown(is_error)}.", "messages")
    if is_error:
        has_text = bool(said) and said[0]["type"] == "text"
        said = [_text(f"Error: {said[0]['text']}" if has_text else "Error"), *said[has_text:]]
    return _message("tool", said or [_text("")], tool_call_id=_string(at, block, "tool_use_id"))


def _wrong_block(at: str, kind: object, role: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{at} has the type {shown(kind)}; in a message of the role {role!r} this server takes blocks of the type "
        f"{_BLOCKS[role]}.",
        "messages",
    )


def _content(where: str, content: Any, param: str, *, takes_images: bool = False) -> list[dict[str, Any]]:
    """The parts of a content that holds text alone, or text and images; texts without a character are left out."""
    if isinstance(content, str):
        return [_text(content)] if content else []
    takes = "'text' or 'image'" if takes_images else "'text'"
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} must be text or a list of blocks of the type {takes}.", param)
    parts = []
    for number, block in enumerate(content):
        at = f"{where}[{number}]"
        kind = block.get("type") if isinstance(block, dict) else block
        if isinstance(block, dict) and kind == "text":
            if text := _string(at, block, "text", param):
                parts.append(_text(text))
        elif isinstance(block, dict) and kind == "image" and takes_images:
            parts.append(_image(at, block))
        else:
            raise InvalidRequestError(f"{at} must be a block of the type {takes}, got {shown(kind)}.", param)
    return parts


def _image(at: str, block: Mapping[str, Any]) -> dict[str, Any]:
    """An image. What its file is, its bytes say: a wrong ``media_type`` does not matter to who reads them."""
    source = block.get("source")
    if not isinstance(source, dict):
        raise InvalidRequestError(
            f'{at}.source must be an object such as {{"type": "base64", "media_type": "image/png", "data": "..."}}, '
            f"got {shown(source)}.",
            "messages",
        )
    kind = source.get("type")
    if kind == "url":
        return image_part(_string(f"{at}.source", source, "url"), f"{at}.source.url")
    if kind != "base64":
        raise InvalidRequestError(
            f"{at}.source.type must be base64, or url with a data: URL, got {shown(kind)}: this server stores no files "
            "and fetches none.",
            "messages",
        )
    media_type = source.get("media_type")
    if media_type is not None and media_type not in _MEDIA_TYPES:
        raise InvalidRequestError(
            f"{at}.source.media_type must be one of {', '.join(_MEDIA_TYPES)}, got {shown(media_type)}.", "messages"
        )
    data = _string(f"{at}.source", source, "data")
    return image_part(data, f"{at}.source.data", f"data:{media_type or 'image/png'};base64,")


def _string(at: str, block: Mapping[str, Any], key: str, param: str = "messages") -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{at}.{key} must be a string, got {shown(value)}.", param)
    return value


def _call(at: str, block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise InvalidRequestError(f"{at}.input must be an object, got {shown(arguments)}.", "messages")
    # An object is what templates get in the end, so the arguments stay one.
    function = {"name": _string(at, block, "name"), "arguments": arguments}
    return {"id": _string(at, block, "id"), "type": "function", "function": function}


def _tool(at: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    if (kind := tool.get("type")) not in (None, "custom"):
        raise InvalidRequestError(
            f"{at}.type is {shown(kind)}, a tool that Anthropic's servers run themselves; this server runs none: leave "
            "it out, or give a tool of your own, of the type 'custom'.",
            "tools",
        )
    if tool.get("description") is not None:
        _string(at, tool, "description", "tools")
    function = {key: tool[key] for key in ("name", "description", "strict") if tool.get(key) is not None}
    if (schema := tool.get("input_schema")) is not None:
        function["parameters"] = schema
    return {"type": "function", "function": function}


def _choice(choice: Mapping[str, Any] | None) -> dict[str, Any]:
    if choice is None:
        return {}
    kind = choice.get("type")
    is_single = choice.get("disable_parallel_tool_use")
    if is_single is not None and not isinstance(is_single, bool):
        raise InvalidRequestError(
            f"tool_choice.disable_parallel_tool_use must be true or false, got {shown(is_single)}.", "tool_choice"
        )
    fields: dict[str, Any] = {"parallel_tool_calls": False} if is_single else {}
    if kind == "tool":
        return {"tool_choice": {"type": "function", "function": {"name": choice.get("name")}}, **fields}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise InvalidRequestError(
            f"tool_choice.type must be auto, any, tool (with name) or none, got {shown(kind)}.", "tool_choice"
        )
    return {"tool_choice": _CHOICES[kind], **fields}


def _thinking(thinking: Mapping[str, Any] | None, *, has_tools: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of the request, and variables of the template, that ask for thoughts or for none."""
    if thinking is None:
        return {}, {}
    kind, display = thinking.get("type"), thinking.get("display")
    if kind in ("disabled", "between_tools"):
        # The latter is Anthropic's for no thoughts before the answer; notes between calls of tools are still shown.
        shows = kind == "between_tools" and has_tools
        return {} if shows else {"include_reasoning": False}, {"enable_thinking": False, "thinking": False}
    if kind not in ("enabled", "adaptive"):
        raise InvalidRequestError(
            "thinking.type must be enabled (with budget_tokens), adaptive, between_tools or disabled, got "
            f"{shown(kind)}.",
            "thinking",
        )
    if display not in (None, "summarized", "omitted"):
        raise InvalidRequestError(f"thinking.display must be summarized or omitted, got {shown(display)}.", "thinking")
    fields: dict[str, Any] = {"include_reasoning": False} if display == "omitted" else {}
    if kind == "enabled":
        budget = thinking.get("budget_tokens")
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
            raise InvalidRequestError(
                f"thinking.budget_tokens must be a whole number of at least 1, got {shown(budget)}.", "thinking"
            )
        fields["thinking_token_budget"] = budget
    return fields, {"enable_thinking": True, "thinking": True}


def _turns_with_thoughts(management: Mapping[str, Any] | None) -> int | None:
    """How many turns of the assistant keep their thoughts; None: all do."""
    edits = (management or {}).get("edits") or []
    if not isinstance(edits, list):
        raise InvalidRequestError(f"context_management.edits must be a list, got {shown(edits)}.", "context_management")
    num_turns = None
    for number, edit in enumerate(edits):
        at = f"context_management.edits[{number}]"
        kind = edit.get("type") if isinstance(edit, dict) else edit
        if kind != _CLEAR_THINKING:
            raise InvalidRequestError(
                f"{at}.type must be {_CLEAR_THINKING}, got {shown(kind)}: this server leaves out nothing else; send "
                "the messages that count.",
                "context_management",
            )
        keep = edit.get("keep")
        if keep is None:
            keep = {"type": "thinking_turns", "value": 1}
        if keep in ("all", {"type": "all"}):
            continue
        kept = keep.get("value") if isinstance(keep, dict) and keep.get("type") == "thinking_turns" else None
        if isinstance(kept, bool) or not isinstance(kept, int) or kept < 1:
            raise InvalidRequestError(
                f'{at}.keep must be "all" or {{"type": "thinking_turns", "value": N}} with N of at least 1, got '
                f"{shown(keep)}.",
                "context_management",
            )
        num_turns = kept if num_turns is None else min(kept, num_turns)
    return num_turns


def _output(config: Mapping[str, Any] | None) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if config is None:
        return fields
    if (effort := config.get("effort")) is not None:
        if effort not in _EFFORTS:
            raise InvalidRequestError(
                f"output_config.effort must be one of {', '.join(_EFFORTS)}, got {shown(effort)}.", "output_config"
            )
        fields["reasoning_effort"] = effort
    if (wanted := config.get("format")) is not None:
        if not isinstance(wanted, dict) or wanted.get("type") != "json_schema" or "schema" not in wanted:
            raise InvalidRequestError(
                f"output_config.format must have the type 'json_schema' and a schema, got {shown(wanted)}.",
                "output_config",
            )
        schema = {"name": "answer", "schema": wanted["schema"], "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _user(metadata: Mapping[str, Any] | None) -> str | None:
    user = (metadata or {}).get("user_id")
    if user is not None and not isinstance(user, str):
        raise InvalidRequestError(f"metadata.user_id must be a string, got {shown(user)}.", "metadata")
    return user
