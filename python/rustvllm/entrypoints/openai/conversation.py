"""Chat messages as the template gets them: roles checked, content parts made text."""

import json
from collections.abc import Sequence
from typing import Any

from rustvllm.entrypoints.chat_template import walks_through_parts
from rustvllm.entrypoints.openai.protocol import ChatMessage
from rustvllm.exceptions import InvalidRequestError

ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_MEDIA_PARTS = (
    "image_url",
    "image",
    "input_image",
    "image_pil",
    "image_embeds",
    "input_audio",
    "audio_url",
    "audio",
    "video_url",
    "video",
    "file",
    "input_file",
)


def build_conversation(
    messages: Sequence[ChatMessage], chat_template: str, content_format: str = "auto"
) -> list[dict[str, Any]]:
    """Messages as :func:`~rustvllm.entrypoints.chat_template.render_chat` takes them.

    ``content`` is a string, in which text parts are joined by line breaks (``string``), or a list of text parts
    (``openai``); ``auto`` means such a list for a template that walks through it. ``developer`` becomes ``system`` for
    templates that do not know it, and the arguments of tool calls, which clients send as JSON text, become objects,
    which is what templates print.

    Raises:
        InvalidRequestError: No message, an unknown role, a part that is no text, or no content where there must be.
    """
    if not messages:
        raise InvalidRequestError("messages must not be empty.", "messages")
    knows_developer = "developer" in chat_template
    in_parts = walks_through_parts(chat_template) if content_format == "auto" else content_format == "openai"
    return [
        _build_message(index, message, knows_developer, in_parts=in_parts) for index, message in enumerate(messages)
    ]


def _build_message(index: int, message: ChatMessage, knows_developer: bool, *, in_parts: bool) -> dict[str, Any]:
    role = message.role
    if role not in ROLES:
        raise InvalidRequestError(
            f"messages[{index}].role is {role[:64]!r}; it must be one of {', '.join(ROLES)}.", "messages"
        )
    if role == "developer" and not knows_developer:
        role = "system"
    built: dict[str, Any] = dict(message.model_extra or {})
    built["role"] = role
    texts = _texts(index, message)
    built["content"] = [{"type": "text", "text": text} for text in texts] if in_parts else "\n".join(texts)
    if message.name is not None:
        built["name"] = message.name
    if message.tool_call_id is not None:
        built["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        built["tool_calls"] = [_build_tool_call(index, call) for call in message.tool_calls]
    return built


def message_text(index: int, message: ChatMessage) -> str:
    """The text of a message: its content, or that of its parts, one line each.

    Raises:
        InvalidRequestError: A part that is no text, or no content where there must be.
    """
    return "\n".join(_texts(index, message))


def _texts(index: int, message: ChatMessage) -> list[str]:
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise InvalidRequestError(
                f"messages[{index}].content is required for the role {message.role!r}.", "messages"
            )
        return []  # an assistant's turn may consist of tool calls
    if isinstance(content, str):
        return [content]
    if not content:
        raise InvalidRequestError(f"messages[{index}].content must not be an empty list.", "messages")
    return [_part_text(f"messages[{index}].content[{number}]", part) for number, part in enumerate(content)]


def _part_text(where: str, part: dict[str, Any]) -> str:
    kind = part.get("type", "text" if "text" in part else None)
    if kind in _MEDIA_PARTS:
        raise InvalidRequestError(
            f"{where} has the type {kind!r}, which is not supported yet; this server takes text parts only.", "messages"
        )
    key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        shown = repr(kind)[:64]
        raise InvalidRequestError(f"{where} has the type {shown}; it must be 'text'.", "messages")
    text = part.get(key)
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where} must have a string as its {key!r}.", "messages")
    return text


def _build_tool_call(index: int, call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"messages[{index}].tool_calls must hold functions with a name.", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments else {}
        except ValueError:
            raise InvalidRequestError(
                f"messages[{index}].tool_calls has arguments of {function['name'][:64]!r} that are not valid JSON.",
                "messages",
            ) from None
    return {**call, "function": {**function, "arguments": arguments}}
