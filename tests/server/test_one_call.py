"""``parallel_tool_calls: false``: a model that says two calls is stopped behind the first, in an engine process."""

import os
from pathlib import Path

import httpx
import pytest
from message_deltas import joined, without_ids
from server_process import REAL, ServerProcess

CHAT = "/v1/chat/completions"
FIRST = 'Look. <tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}'
TEXT = FIRST + '\n</tool_call>\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call> That is all.'
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": CITY}} for name in ("weather", "time")]


@pytest.fixture(scope="module", params=["off", "syntax"])
def server(request):
    """Calls of a free choice obey nothing, or a grammar that allows text behind them."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    flags = ["--port", "0", "--max-num-seqs", "4", "--max-model-len", "480", "--tool-call-parser", "hermes"]
    flags += ["--tool-call-constraint", request.param, "--logits-processors", "processors_for_tests:Say"]
    with ServerProcess([*REAL, *flags], PYTHONPATH=path) as process:
        process.wait_until_ready()
        yield process


def ids_of(server, text):
    answer = httpx.post(server.url + "/tokenize", json={"prompt": text, "add_special_tokens": False}, timeout=60)
    return answer.json()["tokens"]


def shown(server, ids):
    return httpx.post(server.url + "/detokenize", json={"tokens": ids}, timeout=60).json()["prompt"].lstrip()


def answered(server, stream, **fields):
    """Message, its calls as bare functions, end and usage of an answer that says :data:`TEXT`, and what its ids are."""
    ids = ids_of(server, TEXT)
    body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 200, "tools": TOOLS}
    body |= {"vllm_xargs": {"says": ids}, "stream": stream, **fields}
    if stream:
        body["stream_options"] = {"include_usage": True}
    response = httpx.post(server.url + CHAT, json=body, timeout=60)
    assert response.status_code == 200, response.text
    if not stream:
        [choice] = response.json()["choices"]
        return without_ids(choice["message"]), choice["finish_reason"], response.json()["usage"], ids
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    events = [httpx.Response(200, text=line).json() for line in lines]
    message, end = joined(events)
    return message, end, events[-1]["usage"], ids


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_behind_its_first_call(server, stream):
    message, end, usage, ids = answered(server, stream, parallel_tool_calls=False)
    assert end == "tool_calls"
    [call] = message["tool_calls"]
    assert call == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert message["content"] == "Look."
    num_tokens = usage["completion_tokens"]
    lengths = [len(shown(server, ids[:count])) for count in (num_tokens - 1, num_tokens)]
    assert lengths[0] < len(FIRST) <= lengths[1], "the token that ends the call is the last that counts"


@pytest.mark.parametrize("stream", [False, True])
def test_the_same_text_is_two_calls_where_they_are_wanted(server, stream):
    message, _, usage, ids = answered(server, stream)
    assert [call["name"] for call in message["tool_calls"]] == ["weather", "time"]
    assert usage["completion_tokens"] >= len(ids)
