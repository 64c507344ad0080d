"""``POST /tokenize`` and ``POST /detokenize``: what a prompt is to the model, and back."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from rustvllm.exceptions import InvalidRequestError
from rustvllm.process.memory import give_back_memory
from rustvllm.server.endpoints.conversation import adds_special_tokens, render_prompt
from rustvllm.server.schemas.protocol import (
    DetokenizeRequest,
    TokenIdList,
    TokenizeChatRequest,
    TokenizeRequest,
)
from rustvllm.server.schemas.request_body import at_size, read_request
from rustvllm.server.state import ServedModel, ServerState
from rustvllm.server.stream.generation import unless_left
from rustvllm.server.stream.sse import json_bytes
from rustvllm.text.tokenizer import TokenIds


class _Sources(BaseModel):
    """What a prompt may be made from; only whether it is there is looked at."""

    model_config = ConfigDict(extra="ignore")

    prompt: Any = None
    messages: Any = None


MAX_TEXT_BYTES = 1 << 20
"""Longest text, in UTF-8, that ``/tokenize`` takes for models with a shorter context."""
_BYTES_PER_TOKEN = 8
"""Bytes of text per token, which hardly any prompt exceeds."""
MAX_TOKENS = 1 << 18
"""Most token ids that ``/detokenize`` takes for models with a shorter context."""
_SLICE = 4096
"""Token ids that become JSON at a time, which takes less than a millisecond; longer lists do so in a thread."""


async def tokenize(raw_request: Request) -> Response:
    """Token ids of a text, or of a conversation as the chat endpoint would put it to the model."""
    state: ServerState = raw_request.app.state.server
    kind = await _kind(raw_request)
    request = await read_request(raw_request, kind)
    model = state.model
    await model.refresh_adapters(request.model)
    model.resolve_name(request.model)
    tokenizer = tokenizer_of(model)
    if isinstance(request, TokenizeChatRequest):
        rendering = render_prompt(request, state, model, partial(at_size, raw_request))
        text, param = await unless_left(raw_request, rendering), "messages"
        special = adds_special_tokens(request.add_special_tokens, model)
    else:
        text, param = request.prompt, "prompt"
        special = request.add_special_tokens is not False
    check_size(text, model, param)
    ids = await unless_left(raw_request, tokenizer.encode_off_loop(text, special))
    entries = tokenizer.convert_ids_to_tokens if request.return_token_strs else None
    if len(ids) <= _SLICE:
        return _answer(ids, model, entries)
    try:
        return await asyncio.to_thread(_answer, ids, model, entries)
    finally:
        await asyncio.to_thread(give_back_memory)


async def detokenize(raw_request: Request) -> dict[str, str]:
    """The text of token ids, special tokens included."""
    state: ServerState = raw_request.app.state.server
    request = await read_request(raw_request, DetokenizeRequest)
    model = state.model
    await model.refresh_adapters(request.model)
    model.resolve_name(request.model)
    return {"prompt": await at_size(raw_request, partial(_text, request.tokens, model))}


def check_size(text: str, model: ServedModel, param: str) -> None:
    """Refuse a text that would take long to tokenise and cannot be a prompt of the model.

    Raises:
        InvalidRequestError: Names its size and the limit.
    """
    limit = max(MAX_TEXT_BYTES, _BYTES_PER_TOKEN * model.max_model_len)
    size = len(text)
    if size <= limit:  # encoding it takes a moment as well
        size = len(text.encode(errors="surrogatepass"))
    if size > limit:
        raise InvalidRequestError(
            f"The text has at least {size} bytes; the limit per request is {limit}: send it in pieces.",
            param,
        )


def _answer(ids: TokenIds, model: ServedModel, entries: Callable[[Sequence[int]], Any] | None) -> Response:
    """What ``/tokenize`` says, made slice by slice: between two of them others have the interpreter."""
    parts = [list(ids[start : start + _SLICE]) for start in range(0, len(ids), _SLICE)]
    tokens = b",".join(json_bytes(part)[1:-1] for part in parts)
    strings = b"null" if entries is None else b"[%b]" % b",".join(json_bytes(entries(part))[1:-1] for part in parts)
    head = b'{"count":%d,"max_model_len":%d,"tokens":[' % (len(ids), model.max_model_len)
    return Response(b"".join((head, tokens, b'],"token_strs":', strings, b"}")), media_type="application/json")


def _text(tokens: TokenIdList, model: ServedModel) -> str:
    limit = max(MAX_TOKENS, model.max_model_len)
    if len(tokens) > limit:
        raise InvalidRequestError(
            f"tokens has {len(tokens)} token ids; the limit for this model is {limit}: send them in pieces.",
            "tokens",
        )
    largest, smallest = max(tokens, default=0), min(tokens, default=0)
    wrong = smallest if smallest < 0 else largest
    if not 0 <= wrong < model.vocab_size:
        raise InvalidRequestError(
            f"token id {str(wrong)[:32]} is outside the vocabulary: ids are 0 to {model.vocab_size - 1}.", "tokens"
        )
    text: str = tokenizer_of(model).decode(tokens, skip_special_tokens=False)
    return text


async def _kind(raw_request: Request) -> type[TokenizeRequest] | type[TokenizeChatRequest]:
    sources = await read_request(raw_request, _Sources)
    if sources.prompt is not None and sources.messages is not None:
        raise InvalidRequestError("prompt and messages must not both be given.", "messages")
    return TokenizeRequest if sources.messages is None else TokenizeChatRequest


def tokenizer_of(model: ServedModel) -> Any:
    """The tokenizer of a model.

    Raises:
        InvalidRequestError: The server has none.
    """
    if model.tokenizer is None:
        raise InvalidRequestError("This server has no tokenizer (skip_tokenizer_init).")
    return model.tokenizer
