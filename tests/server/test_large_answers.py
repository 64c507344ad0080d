"""Large answers hold up no other request: openings, ends, log-probabilities and JSON of thousands of choices.

A real engine with a simulated model runs in a thread next to the event loop. The application is called without a client
that would work in the same loop; no callback may take 5 ms of processor time.
"""

import asyncio
import gc
import json
import shutil
from pathlib import Path

import pytest
from asgi_client import post_scope
from loop_watch import ATTEMPTS, longest_callback, watched_loop

import rustvllm
from rustvllm import AsyncEngineArgs
from rustvllm.engine.async_llm import AsyncLLM
from rustvllm.server.answers.large_answers import PiecewiseResponse
from rustvllm.server.app import build_app
from rustvllm.server.state import ServerState

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MAX_MODEL_LEN = 8192
USER = {"role": "user", "content": "x"}
STOP = [f"w{number:059d}" for number in range(1024)]
SAMPLED = {"temperature": 1.0, "ignore_eos": True}
LONG = "word " * 1800
RESPONSE = {
    "input": "x",
    "max_output_tokens": 1500,
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 20,
    "ignore_eos": True,
}
CASES = {
    "n": (COMPLETIONS, {"prompt": "a", "max_tokens": 1, "n": 16384, **SAMPLED}),
    "n, streamed": (COMPLETIONS, {"prompt": "a", "max_tokens": 1, "n": 16384, "stream": True, **SAMPLED}),
    "n of a chat": (CHAT, {"messages": [USER], "max_tokens": 1, "n": 16384, **SAMPLED}),
    "n of a chat, streamed": (CHAT, {"messages": [USER], "max_tokens": 1, "n": 16384, "stream": True, **SAMPLED}),
    "echo": (COMPLETIONS, {"prompt": LONG[:4000], "max_tokens": 1, "n": 1000, "echo": True, "stream": True, **SAMPLED}),
    "stop": (COMPLETIONS, {"prompt": "a", "max_tokens": 3, "stop": STOP}),
    "stop of many samples": (COMPLETIONS, {"prompt": "a", "max_tokens": 3, "stop": STOP, "n": 1000, **SAMPLED}),
    "stop of many prompts": (COMPLETIONS, {"prompt": ["a"] * 200, "max_tokens": 3, "stop": STOP}),
    "prompts": (COMPLETIONS, {"prompt": ["a"] * 2000, "max_tokens": 1}),
    "prompt_logprobs": (COMPLETIONS, {"prompt": LONG, "max_tokens": 1, "prompt_logprobs": 20}),
    "echo, logprobs": (COMPLETIONS, {"prompt": LONG, "max_tokens": 1, "logprobs": 20, "echo": True}),
    "echo, logprobs, streamed": (
        COMPLETIONS,
        {"prompt": LONG, "max_tokens": 1, "logprobs": 20, "echo": True, "stream": True},
    ),
    "logprobs": (COMPLETIONS, {"prompt": "a", "max_tokens": 1500, "logprobs": 20, "ignore_eos": True}),
    "logprobs of many samples": (COMPLETIONS, {"prompt": "a", "max_tokens": 50, "logprobs": 20, "n": 128, **SAMPLED}),
    "logprobs of many samples, streamed": (
        COMPLETIONS,
        {"prompt": "a", "max_tokens": 20, "logprobs": 20, "n": 128, "stream": True, **SAMPLED},
    ),
    "logprobs of a chat": (
        CHAT,
        {"messages": [USER], "max_tokens": 1500, "logprobs": True, "top_logprobs": 20, "ignore_eos": True},
    ),
    "logprobs of a response": (RESPONSES, RESPONSE),
    "logprobs of a response, streamed": (RESPONSES, {**RESPONSE, "stream": True}),
    "token ids": (
        COMPLETIONS,
        {"prompt": list(range(5, 1900)), "max_tokens": 1, "n": 500, "return_token_ids": True, **SAMPLED},
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The embedded model with a longer context: a simulation has no weights that would mind."""
    folder = tmp_path_factory.mktemp("long-model")
    (assets,) = (path.parent for path in Path(rustvllm.__file__).parent.glob("assets/**/config.json"))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(assets / name, folder)
    config = json.loads((assets / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "n_positions": MAX_MODEL_LEN}))
    return folder


async def call(app, path: str, body: bytes) -> tuple[int, int, bytes]:
    """One request, as an ASGI server passes it on: status, size of the answer, its last bytes."""
    status, size, last = 0, 0, b""
    gone = asyncio.Event()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        nonlocal status, size, last
        status = message.get("status", status)
        part = message.get("body", b"")
        size, last = size + len(part), part[-200:] or last

    await app(post_scope(path, (b"content-length", b"%d" % len(body))), receive, send)
    gone.set()
    return status, size, last


async def test_no_part_of_a_large_answer_holds_the_event_loop(model):
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(model=str(model), executor="sim", sim_step_time=1.0, max_model_len=MAX_MODEL_LEN)
    )
    state = ServerState()
    state.set_ready(engine)
    app = build_app(state)
    too_long = []
    try:
        firsts = {COMPLETIONS: {"prompt": "a"}, CHAT: {"messages": [USER]}, RESPONSES: {"input": "a"}}
        for path, first in firsts.items():  # what is imported and compiled once
            length = "max_output_tokens" if path == RESPONSES else "max_tokens"
            assert (await call(app, path, json.dumps({**first, length: 1}).encode()))[0] == 200
        gc.collect()
        gc.freeze()
        gc.disable()  # a collection walks over every object of the process
        for name, (path, fields) in CASES.items():
            body = json.dumps(fields).encode()
            limit = longest_callback()
            longest = []
            while len(longest) < ATTEMPTS and min(longest, default=limit) >= limit:
                with watched_loop() as watch:
                    status, size, last = await call(app, path, body)
                    await asyncio.sleep(0.05)  # its end, too
                assert status == 200, (name, last)
                assert size > 300
                assert watch.count > 5
                longest.append(watch.longest)
            if min(longest) >= limit:
                shown = ", ".join(f"{seconds * 1000:.1f}" for seconds in longest)
                too_long.append(f"{name}: {shown} ms of processor time, {limit * 1000:.1f} are possible")
    finally:
        gc.enable()
        gc.unfreeze()
        engine.shutdown()
        state.close()
    assert not too_long, "\n".join(too_long)


def test_every_case_is_at_a_limit_or_large():
    assert sum(map(len, STOP)) > 60_000
    assert max(fields.get("n", 1) for _, fields in CASES.values()) == 16384


async def test_pieces_are_sent_as_they_are_taken_and_then_freed():
    pieces = [bytes([65 + index % 26]) * (10_000 + 977 * index % 90_000) for index in range(90)]
    sent, has_room = [], asyncio.Event()
    has_room.set()

    async def send(message):
        await has_room.wait()
        if len(sent) == 5:
            has_room.clear()
        sent.append(message)

    response = await asyncio.to_thread(PiecewiseResponse, iter(pieces))
    task = asyncio.create_task(response({"type": "http"}, None, send))
    await asyncio.sleep(0.05)
    assert len(sent) == 6, "it waits for the client"
    has_room.set()
    await task
    start, *bodies = sent
    assert dict(start["headers"])[b"content-length"] == b"%d" % sum(map(len, pieces))
    assert dict(start["headers"])[b"content-type"] == b"application/json"
    assert b"".join(body["body"] for body in bodies) == b"".join(pieces)
    assert [body["more_body"] for body in bodies] == [True] * (len(bodies) - 1) + [False]
    assert max(len(body["body"]) for body in bodies) < 300_000
    assert not any(response._blocks)


@pytest.mark.parametrize("pieces", [[], [b""], [b"{}"]])
async def test_small_bodies_in_pieces(pieces):
    sent = []

    async def send(message):
        sent.append(message)

    await PiecewiseResponse(pieces)({"type": "http"}, None, send)
    assert dict(sent[0]["headers"])[b"content-length"] == b"%d" % len(b"".join(pieces))
    assert b"".join(message["body"] for message in sent[1:]) == b"".join(pieces)
