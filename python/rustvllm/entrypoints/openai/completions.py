"""``POST /v1/completions``."""

import time
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rustvllm.entrypoints.openai.chunks import ChunkRenderer, ChunkStream
from rustvllm.entrypoints.openai.generation import (
    Generation,
    new_request_id,
    until_disconnect,
)
from rustvllm.entrypoints.openai.logprobs import completion_logprobs, num_prompt_logprobs, shown_prompt_logprobs
from rustvllm.entrypoints.openai.prompt_echo import PromptEcho, joined
from rustvllm.entrypoints.openai.prompts import engine_prompt
from rustvllm.entrypoints.openai.protocol import CompletionRequest
from rustvllm.entrypoints.openai.refusals import COMPLETION_REFUSALS, refuse_unbuilt
from rustvllm.entrypoints.openai.request_body import read_request
from rustvllm.entrypoints.openai.sampling import (
    DEFAULT_COMPLETION_MAX_TOKENS,
    build_sampling_params,
    check_num_choices,
    check_stream_options,
)
from rustvllm.entrypoints.openai.sse import EventStreamResponse
from rustvllm.entrypoints.openai.state import ServedModel, ServerState
from rustvllm.entrypoints.openai.timings import Timings
from rustvllm.entrypoints.openai.usage import UsageCounter
from rustvllm.exceptions import InvalidRequestError

router = APIRouter()


def _max_tokens(request: CompletionRequest, model: ServedModel) -> int:
    if request.max_tokens is None:
        return min(DEFAULT_COMPLETION_MAX_TOKENS, model.max_model_len)
    if request.max_tokens < (0 if request.echo else 1):
        hint = "" if request.echo else " (0 is allowed with echo only)"
        raise InvalidRequestError(
            f"max_tokens must be at least {0 if request.echo else 1}, got {request.max_tokens}{hint}.", "max_tokens"
        )
    return request.max_tokens


@router.post("/v1/completions")
async def create_completion(raw_request: Request) -> Response:
    """Continue one or several prompts."""
    state: ServerState = raw_request.app.state.server
    state.check_serving()
    request = await read_request(raw_request, CompletionRequest)
    state.settings.complete(request)
    model = state.model
    name = model.resolve_name(request.model)
    refuse_unbuilt(request, COMPLETION_REFUSALS)
    check_stream_options(request)
    logprobs = completion_logprobs(request)
    params = build_sampling_params(
        request,
        model,
        max_tokens=_max_tokens(request, model),
        logprobs=request.logprobs,
        prompt_logprobs=num_prompt_logprobs(request, request.logprobs if request.echo else None),
    )
    check_num_choices(len(request.prompt), params)
    request_id = new_request_id("cmpl-", raw_request, request.request_id)
    prompts = [
        engine_prompt(
            model,
            prompt,
            add_special_tokens=request.add_special_tokens is not False,
            truncated=params.truncate_prompt_tokens is not None,
            cache_salt=request.cache_salt,
            param="prompt",
        )
        for prompt in request.prompt
    ]
    header = {
        "id": request_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": name,
        "system_fingerprint": model.fingerprint,
    }
    usage = UsageCounter(show_cached=state.settings.enable_prompt_tokens_details)
    echo = PromptEcho(request, model)
    if request.stream:
        chunks = ChunkRenderer(
            header,
            b',"text":',
            b"",
            request,
            usage,
            logprobs,
            force_usage=state.settings.enable_force_include_usage,
        )

        def open_choices(prompt_index: int, prompt_token_ids: list[int]) -> bytes:
            text = echo.text(prompt_index, prompt_token_ids)
            first = prompt_index * params.n
            ids = prompt_token_ids if request.return_token_ids else None
            if not text and ids is None:
                return b""
            beside = echo.logprobs(prompt_index)
            return b"".join(chunks.echo(first + sample, text, beside, ids) for sample in range(params.n))

        stream = ChunkStream(chunks, usage, params.n, len(prompts), open_choices, echo.look_at)
        generation = await Generation.start(state, model, prompts, params, request_id, request.priority or 0, stream)
        return EventStreamResponse(stream, generation, request_id, state.settings.sse_keep_alive_interval)
    generation = await Generation.start(state, model, prompts, params, request_id, request.priority or 0)
    async with aclosing(generation):
        last, samples = await until_disconnect(raw_request.receive, generation.collect(len(prompts), params.n))
    timings = Timings(params.num_samples) if request.timings or request.timings_per_token else None
    echoed = [echo.text(index, output.prompt_token_ids) for index, output in enumerate(last)]
    for index, output in enumerate(last):
        usage.add(index, output)
        echo.look_at(index, output)
        if timings is not None:
            timings.add(index, output)
    choices: list[dict[str, Any]] = [
        {
            "index": index,
            "text": echoed[index // params.n] + sample.text,
            "logprobs": None if logprobs is None else joined(echo.logprobs(index // params.n), logprobs(sample)),
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }
        for index, sample in enumerate(samples)
    ]
    if request.return_token_ids:
        for index, (choice, sample) in enumerate(zip(choices, samples, strict=True)):
            choice["token_ids"] = sample.token_ids
            choice["prompt_token_ids"] = last[index // params.n].prompt_token_ids
    if request.prompt_logprobs is not None:
        for index, output in enumerate(last):
            shown = shown_prompt_logprobs(request, output.prompt_token_ids, output.prompt_logprobs)
            for choice in choices[index * params.n : (index + 1) * params.n]:
                choice["prompt_logprobs"] = shown
    answer = {**header, "choices": choices, "usage": usage.as_dict()}
    if timings is not None:
        answer["timings"] = timings.as_dict()
    return JSONResponse(answer)
