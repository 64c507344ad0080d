"""``POST /v1/embeddings``: a vector of each input."""

import time
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from rustvllm.exceptions import InvalidRequestError
from rustvllm.sampling_params import PoolingParams
from rustvllm.server.answers.embeddings import embeddings_response
from rustvllm.server.answers.usage import UsageCounter
from rustvllm.server.endpoints.pipeline import tenant_of
from rustvllm.server.errors import UnavailableError
from rustvllm.server.http.front_door import ARRIVAL_NS
from rustvllm.server.schemas.protocol import EmbeddingRequest
from rustvllm.server.schemas.refusals import EMBEDDING_REFUSALS
from rustvllm.server.schemas.request_body import at_size, read_request, refuse_unbuilt
from rustvllm.server.state import ServerState
from rustvllm.server.stream.generation import Generation, new_request_id, until_disconnect

if TYPE_CHECKING:
    from rustvllm.engine.request.prompts import TextPrompt, TokensPrompt


async def create_embeddings(raw_request: Request) -> Response:
    """Make an embedding of each input; each is a request of its own for the engine."""
    state: ServerState = raw_request.app.state.server
    request = await read_request(raw_request, EmbeddingRequest)
    model = state.model
    await model.refresh_adapters(request.model)
    name = model.resolve_name(request.model)
    model.check_task("embed")
    refuse_unbuilt(request, EMBEDDING_REFUSALS)
    params = PoolingParams(
        dimensions=request.dimensions,
        use_activation=request.use_activation,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        truncation_side=request.truncation_side,
    )
    request_id = new_request_id("embd-", raw_request, request.request_id)
    header = {"id": request_id, "object": "list", "created": int(time.time()), "model": name}
    prompts = await at_size(raw_request, partial(_prompts, request))
    try:
        generation = await Generation.start(
            state,
            model,
            prompts,
            params,
            request_id,
            request.priority or 0,
            arrival_ns=raw_request.scope[ARRIVAL_NS],
            tenant=tenant_of(raw_request, request.user),
            lora_request=model.adapter_request(name),
        )
    except InvalidRequestError as error:
        if error.param == "prompt":
            raise InvalidRequestError(str(error), "input") from None
        raise
    async with aclosing(generation):
        outputs, _ = await until_disconnect(raw_request.receive, generation.collect(len(prompts), 1))
    vectors = [output.pooled for output in outputs if output.pooled is not None]
    if len(vectors) < len(prompts):  # without those that are missing the others would be of other inputs
        raise UnavailableError(
            f"{len(prompts) - len(vectors)} of {len(prompts)} inputs were aborted before their embeddings were made: "
            "the server is stopping, or a pause of its engine ended them; send the request again.",
            retry_after=5,
        )
    usage = UsageCounter(show_cached=state.settings.enable_prompt_tokens_details)
    for index, output in enumerate(outputs):
        usage.add(index, output)
    is_base64 = request.encoding_format == "base64"
    return await embeddings_response(vectors, header, usage.of_whole_answer(), is_base64=is_base64)


def _prompts(request: EmbeddingRequest) -> list["TextPrompt | TokensPrompt"]:
    prompts: list[TextPrompt | TokensPrompt] = []
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
