"""Events of a stream's first prompt that come while its others are still handed in, and events that cannot be sent."""

import asyncio
import json

from asgi_client import client_of, events_of

from rustvllm.config.engine_args import AsyncEngineArgs
from rustvllm.engine.async_llm import AsyncLLM
from rustvllm.server.app import build_app
from rustvllm.server.state import ServerState
from rustvllm.server.stream.chunks import PromptEvents

PATIENCE = 50.0


async def test_a_prompt_whose_text_comes_before_its_stream_is_written_goes_on(monkeypatch):
    """A busy event loop hands prompts in over several of its turns; the first one may have text by then."""
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(max_model_len=256, num_gpu_blocks_override=257))
    refused, add, write = asyncio.Event(), engine.add_request, PromptEvents.write

    async def add_and_wait_for_text(*args, **keywords):
        stream = await add(*args, **keywords)
        await asyncio.wait_for(refused.wait(), PATIENCE)
        return stream

    def watched_write(sink, event):
        takes_more = write(sink, event)
        if not takes_more:
            refused.set()
        return takes_more

    monkeypatch.setattr(engine, "add_request", add_and_wait_for_text)
    monkeypatch.setattr(PromptEvents, "write", watched_write)
    state = ServerState(None)
    state.set_ready(engine)
    body = {"prompt": ["One", "Two"], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    try:
        async with client_of(state) as client:
            streamed = client.post("/v1/completions", json={**body, "stream": True})
            events = events_of(await asyncio.wait_for(streamed, PATIENCE))
            assert refused.is_set(), "the stream was not there yet"
            whole = (await client.post("/v1/completions", json=body)).json()
    finally:
        state.close()
        engine.shutdown()
    for choice in whole["choices"]:
        parts = [each for event in events for each in event["choices"] if each["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[-1]["finish_reason"] == "length"


async def test_a_stream_whose_events_cannot_be_sent_ends():
    """As when a middleware of the operator's own fails: the client would wait for what the engine goes on to say."""
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(max_model_len=256, num_gpu_blocks_override=257))
    state = ServerState(None)
    state.set_ready(engine)
    body = {"prompt": "One", "max_tokens": 200, "ignore_eos": True, "stream": True}
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    sent = 0

    async def receive():
        if not messages:
            await asyncio.Event().wait()  # the client stays
        return messages.pop()

    async def send(message):
        nonlocal sent
        sent += 1
        if sent > 3:
            raise RuntimeError("no more")

    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "http_version": "1.1", "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }  # fmt: skip
    try:
        await asyncio.wait_for(build_app(state)(scope, receive, send), PATIENCE)
        assert state.load.total == 0
        assert not state.engine_request_ids
    finally:
        state.close()
        engine.shutdown()
