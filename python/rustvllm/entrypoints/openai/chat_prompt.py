"""From a request's conversation to the text that the model is to continue."""

import asyncio
from functools import partial

from rustvllm.entrypoints.chat_template import check_template_variables, render_chat
from rustvllm.entrypoints.openai.conversation import build_conversation, message_text
from rustvllm.entrypoints.openai.protocol import ChatCompletionRequest, Conversation
from rustvllm.entrypoints.openai.state import ServedModel, ServerState
from rustvllm.entrypoints.template_process import render_apart
from rustvllm.exceptions import InvalidRequestError

MAX_TEMPLATE_CHARS = 64 << 10
"""Of a template that comes with a request; those of models have some thousands."""
_OFF_LOOP_MESSAGES = 256
"""Longer conversations are rendered in a thread, so that other clients' streams go on meanwhile."""


async def render_prompt(request: Conversation, state: ServerState, model: ServedModel) -> str:
    """The conversation as prompt text. A template of the request's own is rendered in another process.

    Raises:
        InvalidRequestError: No tokenizer, a template that may not be sent, messages that the template refuses.
    """
    if model.tokenizer is None:
        raise InvalidRequestError(
            "Chat needs a tokenizer, which this server has not (skip_tokenizer_init); "
            "use /v1/completions with token ids."
        )
    chat_template = model.chat_template
    if request.chat_template is not None:
        if not state.settings.trust_request_chat_template:
            raise InvalidRequestError(
                "This server does not take chat templates from requests; "
                "start it with --trust-request-chat-template to allow that.",
                "chat_template",
            )
        chat_template = request.chat_template
        if len(chat_template) > MAX_TEMPLATE_CHARS:  # it is parsed once here, to see how it wants messages
            raise InvalidRequestError(
                f"chat_template has {len(chat_template)} characters; {MAX_TEMPLATE_CHARS} are taken at most.",
                "chat_template",
            )
    if request.tools is not None and not request.tools:
        raise InvalidRequestError("tools must not be an empty list; leave it out instead.", "tools")
    check_template_variables(request.chat_template_kwargs or {})
    variables = {**state.settings.default_chat_template_kwargs, **(request.chat_template_kwargs or {})}
    continue_final = bool(request.continue_final_message)
    messages = build_conversation(request.messages, chat_template, state.settings.chat_template_content_format)
    options = {
        "add_generation_prompt": _opens_turn(request),
        "continue_final_message": continue_final,
        "tools": request.tools,
        "documents": request.documents,
        **variables,
    }
    if request.chat_template is not None:
        return await render_apart(model.tokenizer, messages, chat_template, **options)
    render = partial(render_chat, model.tokenizer, messages, chat_template=chat_template, **options)
    return await asyncio.to_thread(render) if len(messages) > _OFF_LOOP_MESSAGES else render()


def echoed_message(request: ChatCompletionRequest, role: str) -> str:
    """What ``echo`` puts before each choice: the last message, when the answer has its role."""
    if not request.echo or request.messages[-1].role != role:
        return ""
    return message_text(len(request.messages) - 1, request.messages[-1])


def answering_role(request: Conversation, state: ServerState) -> str:
    """The role of the answer: that of the last message where no new one is opened."""
    return state.settings.response_role if _opens_turn(request) else request.messages[-1].role


def _opens_turn(request: Conversation) -> bool:
    """Whether the prompt ends with what opens a new message."""
    if request.add_generation_prompt is None:  # sent together the two contradict each other; so one follows the other
        return not request.continue_final_message
    return request.add_generation_prompt


def adds_special_tokens(asked: bool | None, model: ServedModel) -> bool:
    """Whether the tokenizer adds its own: a model's template writes them itself, the plain one leaves them to it."""
    return not model.has_own_chat_template if asked is None else asked
