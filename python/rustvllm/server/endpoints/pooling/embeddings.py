"""``POST /v1/embeddings``: a vector of each input."""

import time
from functools import partial
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from rustvllm.server.answers.embeddings import embeddings_response
from rustvllm.server.endpoints.pooling.call import PooledCall
from rustvllm.server.schemas.protocol import EmbeddingRequest, InputsRequest
from rustvllm.server.schemas.refusals import EMBEDDING_REFUSALS
from rustvllm.server.schemas.request_body import at_size, read_request, refuse_unbuilt

if TYPE_CHECKING:
    from rustvllm.engine.request.prompts import PromptType, TextPrompt, TokensPrompt


async def create_embeddings(raw_request: Request) -> Response:
    """Make an embedding of each input; each is a request of its own for the engine."""
    request = await read_request(raw_request, EmbeddingRequest)
    call = await PooledCall.begin(raw_request, request, "embed", "embd-")
    refuse_unbuilt(request, EMBEDDING_REFUSALS)
    prompts = await at_size(raw_request, partial(prompts_of, request))
    vectors, usage = await call.run(prompts, "input")
    header = {"id": call.request_id, "object": "list", "created": int(time.time()), "model": call.name}
    return await embeddings_response(vectors, header, usage, is_base64=request.encoding_format == "base64")


def prompts_of(request: InputsRequest) -> "list[PromptType]":
    """A prompt of each input."""
    prompts: list[PromptType] = []
    for text_or_ids in request.input:
        made: TextPrompt | TokensPrompt
        if isinstance(text_or_ids, str):
            made = {"prompt": text_or_ids, "add_special_tokens": request.add_special_tokens is not False}
        else:
            made = {"prompt_token_ids": text_or_ids}
        if request.cache_salt is not None:
            made["cache_salt"] = request.cache_salt
        prompts.append(made)
    return prompts
