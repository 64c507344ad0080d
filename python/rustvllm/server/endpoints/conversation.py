"""A conversation on its way to the prompt: messages checked and made what templates take, then rendered.

``LLM.chat`` has its messages checked here too, so this needs no HTTP.
"""

import json
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from rustvllm.exceptions import InvalidRequestError
from rustvllm.logger import init_logger
from rustvllm.parameter_checks import shown
from rustvllm.server.endpoints.message_images import MEDIA_PARTS, MessageImages, refuse_media
from rustvllm.server.schemas.field_errors import field_error
from rustvllm.server.schemas.protocol import ChatCompletionRequest, ChatMessage, Conversation, PredictedContent
from rustvllm.text.chat_renderer import ChatRenderer, render_once
from rustvllm.text.chat_template import check_template_variables, special_tokens
from rustvllm.text.turn_formats import TurnFormats

if TYPE_CHECKING:
    from rustvllm.server.state import ServedModel, ServerState

logger = init_logger(__name__)

AtSize = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs work on a request: on the event loop if its body is small, else in a thread."""
MAX_TEMPLATE_CHARS = 64 << 10
"""Of a template that comes with a request; those of models have some thousands."""
_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_MAY_BE_KNOWN = ("developer", "message.thinking")
"""What only some templates know, as they write it."""
_SET_BY_FIELDS = frozenset({"add_generation_prompt", "continue_final_message"})
"""Variables of the template that a request's fields set, whatever its ``chat_template_kwargs`` say."""


def build_conversation(
    messages: Sequence[ChatMessage], chat_template: str, *, in_parts: bool, images: MessageImages | None = None
) -> list[dict[str, Any]]:
    """Messages as :func:`~rustvllm.text.chat_template.render_chat` takes them.

    ``content`` is a string, in which parts are joined by line breaks, or, ``in_parts``, a list of parts. An image goes
    to ``images``, and its part says only that there is one; in a string, a placeholder does.
    ``developer`` becomes ``system`` for templates that do not know it, and the arguments of tool calls, which clients
    send as JSON text, become objects, which is what templates print; text that is not an object's becomes an empty one,
    because a model's slip in a conversation must not end it. A role may be any name: the template decides.

    Raises:
        InvalidRequestError: No message, or a part that is neither text nor an image, or an image without ``images``.
    """
    if not messages:
        raise InvalidRequestError("messages must not be empty.", "messages")
    knows = frozenset(name for name in _MAY_BE_KNOWN if name in chat_template)
    return [
        _build_message(index, message, knows, in_parts=in_parts, images=images)
        for index, message in enumerate(messages)
    ]


def shows_parts(content_format: str, walks_through_parts: bool) -> bool:
    """Whether a template is to get lists of parts: ``openai``, or ``auto`` and a template that walks through them."""
    return walks_through_parts if content_format == "auto" else content_format == "openai"


def _build_message(
    index: int, message: ChatMessage, knows: Collection[str], *, in_parts: bool, images: MessageImages | None
) -> dict[str, Any]:
    role = message.role
    if role == "developer" and "developer" not in knows:
        role = "system"
    built: dict[str, Any] = dict(message.model_extra or {})
    built["role"] = role
    parts = _parts(index, message, images)
    built["content"] = parts
    if not in_parts:
        placeholder = "" if images is None else images.placeholder
        built["content"] = "\n".join(part.get("text", placeholder) for part in parts)
    if message.name is not None:
        built["name"] = message.name
    if message.tool_call_id is not None:
        built["tool_call_id"] = message.tool_call_id
    thought = built.get("reasoning") or built.get("reasoning_content")
    if isinstance(thought, str):  # templates know one name or the other
        built.update(reasoning=thought, reasoning_content=thought)
        # gpt-oss's template takes a message with calls for thoughts or for text, and refuses both.
        if "message.thinking" in knows and not (parts and message.tool_calls):
            built["thinking"] = thought
    if message.tool_calls:
        built["tool_calls"] = [_build_tool_call(index, call) for call in message.tool_calls]
    return built


def message_text(index: int, message: ChatMessage) -> str:
    """The text of a message: its content, or that of its parts, one line each.

    Raises:
        InvalidRequestError: A part that is not text.
    """
    return "\n".join(part["text"] for part in _parts(index, message, None))


def _parts(index: int, message: ChatMessage, images: MessageImages | None) -> list[dict[str, str]]:
    """The parts of a message as templates take them; texts without a character are left out."""
    content = message.content
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    parts = []
    for number, part in enumerate(content):
        where, kind = f"messages[{index}].content[{number}]", part.get("type")
        if kind is None and "image_url" in part:
            kind = "image_url"
        if isinstance(kind, str) and kind in MEDIA_PARTS:
            if images is None:
                raise refuse_media(where, kind, part)
            images.take(where, kind, part)
            parts.append({"type": "image"})
        elif text := _part_text(where, part):
            parts.append({"type": "text", "text": text})
    return parts


def _part_text(where: str, part: dict[str, Any]) -> str:
    kind = part.get("type", "text" if "text" in part else None)
    key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise InvalidRequestError(f"{where} has the type {shown(kind)}; it must be 'text'.", "messages")
    text = part.get(key)
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where} must have a string as its {key!r}.", "messages")
    return text


def _build_tool_call(index: int, call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"messages[{index}].tool_calls must contain functions with a name.", "messages")
    return {**call, "function": {**function, "arguments": _arguments(function)}}


def _arguments(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            logger.warning(
                "the arguments of a call of %.64r in a conversation are not a JSON object: the chat template receives "
                "an empty object",
                function["name"],
            )
    return arguments if isinstance(arguments, dict) else {}


async def render_prompt(
    request: Conversation,
    state: "ServerState",
    model: "ServedModel",
    at_size: AtSize,
    *,
    hides_tools: bool = False,
    images: MessageImages | None = None,
) -> str:
    """The conversation as prompt text, which a process of its own makes of it.

    Args:
        request: With the messages, and how they are to be rendered.
        state: For the server's settings.
        model: For its template.
        at_size: Runs what takes long for a long conversation.
        hides_tools: The template does not get the tools.
        images: Takes the images of the messages; None: they may have none.

    Raises:
        InvalidRequestError: No tokenizer, a template that may not be sent, messages that the template refuses, or that
            take it over its limits.
    """
    if model.tokenizer is None:
        raise InvalidRequestError(
            "Chat needs a tokenizer, but this server runs with skip_tokenizer_init; use /v1/completions with token ids."
        )
    _check_template(request.chat_template, state)
    if request.tools is not None and not request.tools:
        raise InvalidRequestError("tools must not be an empty list; leave it out instead.", "tools")
    variables = {name: of for name, of in (request.chat_template_kwargs or {}).items() if name not in _SET_BY_FIELDS}
    if variables:
        check_template_variables(variables)
    options = {
        "add_generation_prompt": _opens_turn(request),
        "continue_final_message": bool(request.continue_final_message),
        "tools": None if hides_tools else _with_descriptions(request.tools, model.turn_formats),
        "documents": request.documents,
        **state.settings.default_chat_template_kwargs,
        **_effort(request),
        **variables,
    }
    own = request.chat_template
    renderer = model.chat_renderer if options["tools"] is None else model.tool_renderer
    template = renderer.template if own is None else own

    def build(walks_through_parts: bool) -> list[dict[str, Any]]:
        in_parts = shows_parts(state.settings.chat_template_content_format, walks_through_parts)
        return build_conversation(request.messages, template, in_parts=in_parts, images=images)

    if own is not None:
        return await render_once(template, special_tokens(model.tokenizer), build, options)
    prepared = await at_size(lambda: renderer.prepare(build(renderer.walks_through_parts), options))
    return await renderer.render(prepared)


def _with_descriptions(tools: list[dict[str, Any]] | None, formats: TurnFormats) -> list[dict[str, Any]] | None:
    """The tools; the template of gpt-oss takes none without a description, which clients may leave out."""
    if tools is None or not formats.has_messages:
        return tools
    return [_with_description(tool) for tool in tools]


def _with_description(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or function.get("description") is not None:
        return tool
    return {**tool, "function": {**function, "description": ""}}


def _effort(request: Conversation) -> dict[str, Any]:
    """What templates of reasoning models know of the effort that is asked for."""
    if (effort := request.reasoning_effort) is None:
        return {}
    return {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}


def _check_template(template: str | None, state: "ServerState") -> None:
    """Refuse a template in a request where that is not allowed, or one that is too long."""
    if template is None:
        return
    if not state.settings.trust_request_chat_template:
        raise InvalidRequestError(
            "This server does not accept chat templates from requests; start it with --trust-request-chat-template to "
            "allow them.",
            "chat_template",
        )
    if len(template) > MAX_TEMPLATE_CHARS:
        raise InvalidRequestError(
            f"chat_template has {len(template)} characters; at most {MAX_TEMPLATE_CHARS} are allowed.", "chat_template"
        )


def echoed_message(request: ChatCompletionRequest, role: str) -> str:
    """What ``echo`` puts before each choice: the last message, when the answer has its role."""
    if not request.echo or request.messages[-1].role != role:
        return ""
    return message_text(len(request.messages) - 1, request.messages[-1])


def predicted_text(prediction: PredictedContent) -> str:
    """The answer that a request expects; parts of it follow each other as they are.

    Raises:
        InvalidRequestError: A part that is not text.
    """
    content = prediction.content
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequestError(
                f"prediction.content[{index}] must have the type 'text' and a string as its 'text'.", "prediction"
            )
    return "".join(part["text"] for part in content)


def answering_role(request: Conversation, state: "ServerState") -> str:
    """The role of the answer: that of the last message where no new one is opened."""
    return state.settings.response_role if _opens_turn(request) else request.messages[-1].role


def _opens_turn(request: Conversation) -> bool:
    """Whether the prompt ends with what opens a new message."""
    if request.add_generation_prompt is None:  # sent together the two contradict each other; so one follows the other
        return not request.continue_final_message
    return request.add_generation_prompt


def adds_special_tokens(asked: bool | None, model: "ServedModel") -> bool:
    """Whether the tokenizer adds its own: a model's template writes them itself, the plain one leaves them to it."""
    return not model.has_own_chat_template if asked is None else asked


def conversation_of(
    messages: Any, renderer: ChatRenderer, content_format: str, images: MessageImages | None = None
) -> list[dict[str, Any]]:
    """A conversation of a Python program, with the checks of the server, so that both take and refuse the same.

    Args:
        messages: A list of dicts; whatever it is, it is checked.
        renderer: Of its template.
        content_format: ``auto``, ``string`` or ``openai``.
        images: Takes the images of the messages; None: they may have none.

    Raises:
        InvalidRequestError: A message is wrong.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InvalidRequestError(
            f"a conversation must be a list of messages, got {type(messages).__name__}", "messages"
        )
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequestError(
                f"messages[{index}] must be a dict with 'role' and 'content', got {type(message).__name__}", "messages"
            )
        try:
            checked.append(ChatMessage.model_validate(dict(message)))
        except ValidationError as error:
            raise field_error(error, ("messages", index)) from error
    in_parts = shows_parts(content_format, renderer.walks_through_parts)
    return build_conversation(checked, renderer.template, in_parts=in_parts, images=images)
