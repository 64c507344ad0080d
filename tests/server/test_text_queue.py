"""Long texts that wait to be tokenised: those whose client has left are not begun, and their places are free."""

import asyncio

import pytest
from asgi_client import client_of, leaving
from fake_engine import FakeEngine, FakeTokenizer
from simulated_pooling import SIM

from async_streams import until
from rustvllm import AsyncEngineArgs, AsyncLLM
from rustvllm.server.app import build_app
from rustvllm.server.state import ServerState
from rustvllm.text.tokenizer import Tokenizer

LONG = 9_000
"""Characters of a body that is looked at in threads."""
NUM_THREADS, NUM_LEAVING = 2, 30
PATHS = {
    "/v1/completions": lambda text: {"prompt": text, "max_tokens": 1},
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 1},
    "/v1/responses": lambda text: {"input": text, "max_output_tokens": 16},
    "/v1/messages": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 1},
    "/v1/messages/count_tokens": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/tokenize": lambda text: {"prompt": text},
}


class SlowThreads:
    """Stands for the threads that tokenise: a text takes one until ``go`` is set."""

    def __init__(self, kind, monkeypatch):
        self.go = asyncio.Event()
        self.begun, self.num_waiting = [], 0
        self._free = asyncio.Semaphore(NUM_THREADS)
        self._encode = kind.encode_ids

        def encode_off_loop(tokenizer, *order):
            return self.encode(tokenizer, *order)

        monkeypatch.setattr(kind, "encode_off_loop", encode_off_loop)

    async def encode(self, tokenizer, text, add_special_tokens=True):
        self.num_waiting += 1
        try:
            async with self._free:
                self.begun.append(next(char for char in text if char.isupper()))
                await self.go.wait()
                return self._encode(tokenizer, text, add_special_tokens)
        finally:
            self.num_waiting -= 1


async def check(state, threads, path, body_of):
    """Clients leave while their texts wait; one that stays gets its answer, and what left was not tokenised."""
    app, gone = build_app(state), asyncio.Event()
    async with client_of(state) as client:
        first = [asyncio.create_task(leaving(app, path, body_of("A" + "a" * LONG), gone)) for _ in range(NUM_THREADS)]
        await until(lambda: len(threads.begun) == NUM_THREADS)
        waiting = [asyncio.create_task(leaving(app, path, body_of("B" + "b" * LONG), gone)) for _ in range(NUM_LEAVING)]
        await until(lambda: threads.num_waiting == NUM_THREADS + NUM_LEAVING)
        last = asyncio.create_task(client.post(path, json=body_of("C" + "c" * LONG)))
        await until(lambda: threads.num_waiting == NUM_THREADS + NUM_LEAVING + 1)
        gone.set()
        for sent in await asyncio.gather(*first, *waiting):
            assert [message.get("status", 499) for message in sent if "status" in message] in ([], [499])
        await until(lambda: threads.begun == ["A"] * NUM_THREADS + ["C"])
        assert threads.num_waiting == 1
        threads.go.set()
        answer = await last
        assert answer.status_code == 200, answer.text
    assert threads.begun == ["A"] * NUM_THREADS + ["C"]


@pytest.mark.parametrize(("path", "fields"), [*((path, {}) for path in PATHS), ("/v1/completions", {"stream": True})])
async def test_texts_of_clients_that_have_left_are_not_tokenised(monkeypatch, path, fields):
    engine, state = FakeEngine(max_model_len=16_000), ServerState()
    state.set_ready(engine)
    if path.startswith("/v1/messages"):
        fields = {**fields, "model": "fake"}
    try:
        threads = SlowThreads(FakeTokenizer, monkeypatch)
        await check(state, threads, path, lambda text: {**PATHS[path](text), **fields})
        asks = path not in ("/tokenize", "/v1/messages/count_tokens")
        assert len(engine.seen) == asks, "the engine saw the one that stayed"
    finally:
        state.close()
    assert not engine.running


@pytest.mark.parametrize("path", ["/v1/embeddings", "/score"])
async def test_texts_of_pooling_requests_that_have_left_are_not_tokenised(monkeypatch, path):
    bodies = {
        "/v1/embeddings": lambda text: {"input": text, "truncate_prompt_tokens": 8},
        "/score": lambda text: {"text_1": text, "text_2": "x", "truncate_prompt_tokens": 8},
    }
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**(SIM | {"runner": "pooling"})))
    state = ServerState()
    state.set_ready(engine)
    try:
        await check(state, SlowThreads(Tokenizer, monkeypatch), path, bodies[path])
    finally:
        engine.shutdown()
        state.close()


async def test_a_small_body_is_not_watched(monkeypatch):
    """Watching takes two tasks, and a small text is tokenised before a client could leave."""

    async def watched(_receive, work):
        work.close()
        raise AssertionError("it is watched before there is a generation")

    monkeypatch.setattr("rustvllm.server.stream.generation.until_disconnect", watched)
    engine, state = FakeEngine(), ServerState()
    state.set_ready(engine)
    async with client_of(state) as client:
        answer = await client.post("/v1/completions", json=PATHS["/v1/completions"]("a" * 99))
        assert answer.status_code == 200, answer.text
        with pytest.raises(AssertionError, match="watched"):
            await client.post("/v1/completions", json=PATHS["/v1/completions"]("a" * LONG))
    state.close()
