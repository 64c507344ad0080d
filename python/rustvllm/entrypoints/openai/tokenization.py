"""``POST /tokenize`` and ``POST /detokenize``: what a prompt is to the model, and back."""

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request

from rustvllm.entrypoints.openai.chat_prompt import adds_special_tokens, render_prompt
from rustvllm.entrypoints.openai.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest
from rustvllm.entrypoints.openai.request_body import read_request
from rustvllm.entrypoints.openai.state import ServedModel, ServerState
from rustvllm.exceptions import InvalidRequestError

router = APIRouter()


class _Sources(BaseModel):
    """What a prompt may be made from; only whether it is there is looked at."""

    model_config = ConfigDict(extra="ignore")

    prompt: Any = None
    messages: Any = None


@router.post("/tokenize")
async def tokenize(raw_request: Request) -> dict[str, Any]:
    """Token ids of a text, or of a conversation as the chat endpoint would put it to the model."""
    state: ServerState = raw_request.app.state.server
    state.check_serving()
    kind = await _kind(raw_request)
    request = await read_request(raw_request, kind)
    model = state.model
    model.resolve_name(request.model)
    tokenizer = _tokenizer(model)
    if isinstance(request, TokenizeChatRequest):
        text = await render_prompt(request, state, model)
        special = adds_special_tokens(request.add_special_tokens, model)
    else:
        text, special = request.prompt, request.add_special_tokens is not False
    tokens = list(await tokenizer.encode_off_loop(text, special))
    strings = tokenizer.convert_ids_to_tokens(tokens) if request.return_token_strs else None
    return {"count": len(tokens), "max_model_len": model.max_model_len, "tokens": tokens, "token_strs": strings}


@router.post("/detokenize")
async def detokenize(raw_request: Request) -> dict[str, str]:
    """The text of token ids, special tokens included."""
    state: ServerState = raw_request.app.state.server
    state.check_serving()
    request = await read_request(raw_request, DetokenizeRequest)
    model = state.model
    model.resolve_name(request.model)
    wrong = next((token for token in request.tokens if not 0 <= token < model.vocab_size), None)
    if wrong is not None:
        raise InvalidRequestError(
            f"token id {str(wrong)[:32]} is outside the vocabulary: ids are 0 to {model.vocab_size - 1}.", "tokens"
        )
    return {"prompt": _tokenizer(model).decode(request.tokens, skip_special_tokens=False)}


async def _kind(raw_request: Request) -> type[TokenizeRequest] | type[TokenizeChatRequest]:
    sources = await read_request(raw_request, _Sources)
    if sources.prompt is not None and sources.messages is not None:
        raise InvalidRequestError("prompt and messages must not both be given.", "messages")
    return TokenizeRequest if sources.messages is None else TokenizeChatRequest


def _tokenizer(model: ServedModel) -> Any:
    if model.tokenizer is None:
        raise InvalidRequestError("This server has no tokenizer (skip_tokenizer_init).")
    return model.tokenizer
