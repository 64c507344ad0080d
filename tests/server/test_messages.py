"""``POST /v1/messages`` with Anthropic's own client and without, over the embedded model and an engine without one."""

import json
from collections.abc import Iterator
from pathlib import Path

import anthropic
import httpx
import pytest
from anthropic.types import Message
from asgi_client import serving
from fake_engine import FakeEngine
from server_process import REAL, ServerProcess

from rustvllm.server.flags.http_settings import HttpSettings
from rustvllm.server.schemas.messages import MessageError, MessageResponse
from rustvllm.server.state import ServerSettings

PATH = "/v1/messages"
TEMPLATE = str(Path(__file__).parents[2] / "examples" / "tools.jinja")
USER = {"role": "user", "content": "Once upon a time"}
ASKED = {"model": "rustvllm-tiny", "max_tokens": 20, "messages": [USER], "extra_body": {"temperature": 0}}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"name": "get_weather", "description": "The weather", "input_schema": SCHEMA}]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    argv = [*REAL, "--port", "0", "--max-num-seqs", "8", "--tool-call-parser", "hermes", "--enable-auto-tool-choice"]
    with ServerProcess(
        [*argv, "--api-key", "sesame", "--enable-prompt-tokens-details", "--chat-template", TEMPLATE]
    ) as process:
        process.wait_until_ready()
        yield process


@pytest.fixture
def client(server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="sesame", max_retries=0, timeout=60) as client:
        yield client


def chat(server, **fields):
    """What the chat endpoint says."""
    body = {"max_tokens": 20, "temperature": 0, **fields}
    headers = {"authorization": "Bearer sesame"}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60).json()
    return answer["choices"][0]["message"]["content"]


def events_of(text: str) -> list[dict]:
    """The events of a stream, each of which is named twice."""
    frames = text.split("\n\n")
    assert frames.pop() == ""
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_a_message_is_what_chat_says(server, client):
    raw = client.messages.with_raw_response.create(**ASKED)
    MessageResponse.model_validate_json(raw.text())
    message = Message.model_validate_json(raw.text())
    assert message == raw.parse()
    assert [block.text for block in message.content] == [chat(server, messages=[USER])]
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    num_input = message.usage.input_tokens + message.usage.cache_read_input_tokens
    assert message.usage.output_tokens == 20
    assert client.messages.count_tokens(model="rustvllm-tiny", messages=[USER]).input_tokens == num_input


def test_a_stream_of_text_is_the_whole_answer(client):
    whole = client.messages.create(**ASKED)
    with client.messages.stream(**ASKED) as stream:
        kinds = [event.type for event in stream if event.type != "text"]
        streamed = stream.get_final_message()
    assert streamed.content[0].text == whole.content[0].text
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == 20
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert len(kinds) > 10, "it came in pieces"


def test_a_stream_ends_with_its_last_event(server):
    body = {"messages": [USER], "max_tokens": 3, "stream": True}
    answer = httpx.post(server.url + PATH, json=body, headers={"x-api-key": "sesame"}, timeout=60)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = events_of(answer.text)
    assert events[0]["message"]["content"] == []
    assert events[-1] == {"type": "message_stop"}


@pytest.mark.parametrize(
    ("choice", "num_calls"),
    [
        ({"type": "any"}, None),  # this model goes on and on
        ({"type": "any", "disable_parallel_tool_use": True}, 1),
        ({"type": "tool", "name": "get_weather"}, 1),
    ],
    ids=["any", "any once", "this"],
)
def test_calls_are_blocks_and_the_same_in_a_stream(client, choice, num_calls):
    asked = {**ASKED, "max_tokens": 200, "tools": TOOLS, "tool_choice": choice}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    assert streamed.stop_reason == whole.stop_reason == ("max_tokens" if num_calls is None else "tool_use")
    calls = [block for block in whole.content if block.type == "tool_use"]
    of_stream = [block for block in streamed.content if block.type == "tool_use"]
    assert len(calls) == len(of_stream) == (num_calls or len(calls)) > 0
    complete = slice(None) if num_calls else slice(-1)  # what is cut by length may be in the middle of a call
    assert [call.input for call in calls[complete]] == [call.input for call in of_stream[complete]]
    assert all(call.name == "get_weather" and call.input["city"] in ("Paris", "Rome") for call in calls[complete])


def test_results_of_tools_reach_the_model(client):
    call = {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "sunny"}
    begun = [USER, {"role": "assistant", "content": [call]}]
    short = client.messages.count_tokens(model="rustvllm-tiny", messages=begun, tools=TOOLS)
    ended = [*begun, {"role": "user", "content": [result, {"type": "text", "text": "And?"}]}]
    long = client.messages.count_tokens(model="rustvllm-tiny", messages=ended, tools=TOOLS)
    assert long.input_tokens > short.input_tokens
    assert client.messages.create(**{**ASKED, "messages": ended}, tools=TOOLS).content


def test_an_answer_that_has_begun_goes_on(server, client):
    begun = [USER, {"role": "assistant", "content": "In a quiet"}]
    on = client.messages.create(**{**ASKED, "messages": begun})
    fresh = chat(server, messages=begun)
    assert on.content[0].text == chat(server, messages=begun, continue_final_message=True, add_generation_prompt=False)
    assert on.content[0].text != fresh


def test_an_answer_obeys_a_schema(client):
    config = {"format": {"type": "json_schema", "schema": {"enum": ["Paris", "Rome"]}}}
    message = client.messages.create(**ASKED, output_config=config)
    assert message.content[0].text in ('"Paris"', '"Rome"')


def test_stop_sequences_and_the_end_of_the_context(client):
    text = client.messages.create(**ASKED).content[0].text
    word = text.split()[3]
    stopped = client.messages.create(**ASKED, stop_sequences=[word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    assert stopped.content[0].text == text[: text.index(word)]
    nothing = client.messages.create(**ASKED, stop_sequences=[text[:1]])
    with client.messages.stream(**ASKED, stop_sequences=[text[:1]]) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert streamed.content == nothing.content == []
    assert kinds == ["message_start", "message_delta", "message_stop"]
    assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", text[:1])
    endless = {**ASKED, "max_tokens": 1_000_000, "extra_body": {"temperature": 0}}
    long = client.messages.create(**endless)
    assert long.stop_reason in ("end_turn", "model_context_window_exceeded"), "more than fits is as much as fits"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"stop_sequences": [""]}, "stop_sequences must not contain an empty string"),
        ({"extra_body": {"temperature": 9}}, "temperature must be in [0, 2], got 9"),
        ({"tools": [{"name": "a b"}]}, "tools[0].name must have 1 to 64 characters"),
        ({"tools": [{"name": "a", "input_schema": 5}]}, "tools[0].input_schema must be a JSON schema"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "b"}}, "tool_choice.name must be the name of one"),
        ({"tools": [*TOOLS, *TOOLS]}, "tools[1].name is 'get_weather', which another tool has"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "output_config: type must be"),
        ({"messages": [{"role": "user", "content": ""}] * 8193}, "messages has"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else next(iter(value)),
)
def test_what_is_wrong_is_said_in_the_words_of_this_api(client, fields, says):
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**{**ASKED, **fields})
    MessageError.model_validate(caught.value.body)
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert says in caught.value.body["error"]["message"]


def test_keys_models_and_paths(server, client):
    assert [model.id for model in client.models.list()] == ["rustvllm-tiny"]
    for wrong in ({}, {"x-api-key": "x"}, {"authorization": "Bearer x", "x-api-key": "sesame"}):
        answer = httpx.post(server.url + PATH, json={}, headers=wrong)
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "authentication_error"
    elsewhere = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, headers={"x-api-key": "sesame"})
    assert elsewhere.status_code == 401, "only this API's clients send their key so"
    with anthropic.Anthropic(base_url=server.url, auth_token="sesame", api_key=None, max_retries=0) as bearer:
        assert bearer.messages.create(**ASKED).content
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(**{**ASKED, "model": "gpt-9"})
    answer = httpx.get(server.url + PATH, headers={"x-api-key": "sesame"})
    assert (answer.status_code, answer.json()["type"]) == (405, "error")


async def test_paths_that_are_not_built_name_those_that_are():
    async with serving() as (client, _):
        answer = await client.post(f"{PATH}/batches", json={"requests": []})
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
    assert "POST /v1/messages/batches. Of Anthropic's API this server has POST /v1/messages and" in answer.text


async def test_the_id_of_a_request_is_where_the_client_looks_for_it():
    async with serving(settings=ServerSettings(http=HttpSettings(request_id_headers=True))) as (client, _):
        for body in ({"messages": [USER], "max_tokens": 2}, {}):
            answer = await client.post(PATH, json=body, headers={"X-Request-Id": "mine"})
            assert answer.headers["request-id"] == answer.headers["x-request-id"] == "mine"
        assert "request-id" not in (await client.get("/v1/models")).headers


async def test_an_engine_that_dies_under_a_stream_ends_it_with_an_error_event():
    engine = FakeEngine()
    engine.fail_at = 3
    async with serving(engine) as (client, _):
        answer = await client.post(PATH, json={"messages": [USER], "max_tokens": 9, "stream": True})
    *before, last = events_of(answer.text)
    assert before[0]["type"] == "message_start"
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert "died" in last["error"]["message"]


@pytest.mark.parametrize("says", ["", "Hi"])
async def test_blocks_of_text_in_a_stream_are_those_of_the_whole_answer(says):
    engine = FakeEngine()
    engine.says = says
    body = {"messages": [USER], "max_tokens": 9}
    async with serving(engine) as (client, _):
        whole = (await client.post(PATH, json=body)).json()
        events = events_of((await client.post(PATH, json={**body, "stream": True})).text)
    blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert len(blocks) == len(whole["content"]) == bool(says)
    assert [event["type"] for event in events].count("content_block_stop") == len(blocks)


async def test_arguments_that_are_no_json_end_no_answer():
    engine = FakeEngine(chat_template="{{ tools }}<tool_call>{{ messages[0].content }}", max_model_len=900)
    engine.says = '<tool_call>\n{"name": "get_weather", "arguments": {"city": NaN, "a": "\\ud800"}}\n</tool_call>'
    async with serving(engine) as (client, _):
        answer = await client.post(PATH, json={"messages": [USER], "max_tokens": 200, "tools": TOOLS})
    assert answer.status_code == 200, answer.text
    [block] = answer.json()["content"]
    assert (block["type"], block["input"]) == ("tool_use", {"city": None, "a": "\ufffd"})


async def test_a_body_that_is_too_large():
    async with serving(settings=ServerSettings(max_body_bytes=100)) as (client, _):
        answer = await client.post(PATH, json={"messages": [USER] * 9, "max_tokens": 9})
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "request_too_large")
