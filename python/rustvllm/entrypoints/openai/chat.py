"""``POST /v1/chat/completions``."""

import time
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rustvllm.entrypoints.openai.chat_prompt import (
    adds_special_tokens,
    answering_role,
    echoed_message,
    render_prompt,
)
from rustvllm.entrypoints.openai.chunks import ChunkRenderer, ChunkStream
from rustvllm.entrypoints.openai.generation import (
    Generation,
    new_request_id,
    until_disconnect,
)
from rustvllm.entrypoints.openai.logprobs import chat_logprobs, num_prompt_logprobs, shown_prompt_logprobs
from rustvllm.entrypoints.openai.prompts import engine_prompt
from rustvllm.entrypoints.openai.protocol import ChatCompletionRequest
from rustvllm.entrypoints.openai.refusals import CHAT_REFUSALS, refuse_unbuilt
from rustvllm.entrypoints.openai.request_body import read_request
from rustvllm.entrypoints.openai.sampling import (
    build_sampling_params,
    check_num_choices,
    check_stream_options,
)
from rustvllm.entrypoints.openai.sse import EventStreamResponse, json_string
from rustvllm.entrypoints.openai.state import ServedModel, ServerState
from rustvllm.entrypoints.openai.timings import Timings
from rustvllm.entrypoints.openai.usage import UsageCounter
from rustvllm.exceptions import InvalidRequestError

router = APIRouter()


def _max_tokens(request: ChatCompletionRequest, model: ServedModel) -> tuple[int | None, str]:
    """Most tokens to generate (None: as many as fit) and the field that says so."""
    param = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    asked = getattr(request, param)
    if asked is None:
        default = model.default_max_tokens
        return (None if default is None else min(default, model.max_model_len)), param
    if asked < 1:
        raise InvalidRequestError(f"{param} must be at least 1, got {asked}.", param)
    return asked, param


@router.post("/v1/chat/completions")
async def create_chat_completion(raw_request: Request) -> Response:
    """Answer a conversation."""
    state: ServerState = raw_request.app.state.server
    state.check_serving()
    request = await read_request(raw_request, ChatCompletionRequest)
    state.settings.complete(request)
    model = state.model
    name = model.resolve_name(request.model)
    refuse_unbuilt(request, CHAT_REFUSALS)
    check_stream_options(request)
    max_tokens, param = _max_tokens(request, model)
    logprobs = chat_logprobs(request, model)
    num_logprobs = None if logprobs is None else request.top_logprobs or 0
    params = build_sampling_params(
        request,
        model,
        max_tokens=max_tokens,
        param=param,
        logprobs=num_logprobs,
        prompt_logprobs=num_prompt_logprobs(request),
    )
    check_num_choices(1, params)
    request_id = new_request_id("chatcmpl-", raw_request, request.request_id)
    text = await render_prompt(request, state, model)
    role = answering_role(request, state)
    prompt = engine_prompt(
        model,
        text,
        add_special_tokens=adds_special_tokens(request.add_special_tokens, model),
        truncated=params.truncate_prompt_tokens is not None,
        cache_salt=request.cache_salt,
        param="messages",
    )
    header = {
        "id": request_id,
        "object": "chat.completion.chunk" if request.stream else "chat.completion",
        "created": int(time.time()),
        "model": name,
        "system_fingerprint": model.fingerprint,
    }
    echoed = echoed_message(request, role)
    usage = UsageCounter(show_cached=state.settings.enable_prompt_tokens_details)
    if request.stream:
        chunks = ChunkRenderer(
            header,
            b',"delta":{"content":',
            b"}",
            request,
            usage,
            logprobs,
            force_usage=state.settings.enable_force_include_usage,
        )

        def open_turn(_prompt_index: int, prompt_token_ids: list[int]) -> bytes:
            ids = prompt_token_ids if request.return_token_ids else None
            delta = b',"delta":{"role":%b,"content":""}' % json_string(role)
            roles = b"".join(chunks.raw(index, delta, ids) for index in range(params.n))
            return roles + b"".join(chunks.said(index, echoed) for index in range(params.n) if echoed)

        stream = ChunkStream(chunks, usage, params.n, 1, open_turn)
        generation = await Generation.start(state, model, [prompt], params, request_id, request.priority or 0, stream)
        return EventStreamResponse(stream, generation, request_id, state.settings.sse_keep_alive_interval)
    generation = await Generation.start(state, model, [prompt], params, request_id, request.priority or 0)
    async with aclosing(generation):
        last, samples = await until_disconnect(raw_request.receive, generation.collect(1, params.n))
    usage.add(0, last[0])
    timings = Timings(params.num_samples) if request.timings or request.timings_per_token else None
    choices: list[dict[str, Any]] = [
        {
            "index": index,
            "message": {"role": role, "content": echoed + sample.text},
            "logprobs": None if logprobs is None else logprobs(sample),
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }
        for index, sample in enumerate(samples)
    ]
    answer: dict[str, Any] = {**header, "choices": choices, "usage": usage.as_dict()}
    if request.return_token_ids:
        answer["prompt_token_ids"] = last[0].prompt_token_ids
        for choice, sample in zip(choices, samples, strict=True):
            choice["token_ids"] = sample.token_ids
    if timings is not None:
        timings.add(0, last[0])
        answer["timings"] = timings.as_dict()
    if request.prompt_logprobs is not None:
        answer["prompt_logprobs"] = shown_prompt_logprobs(request, last[0].prompt_token_ids, last[0].prompt_logprobs)
    return JSONResponse(answer)
