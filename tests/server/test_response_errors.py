"""What ``POST /v1/responses`` refuses and in whose words, what fails half-way, and that nothing is stored."""

import asyncio
import json

import pytest
from asgi_client import assert_error, serving
from fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st
from response_stream import (
    PATCH,
    TEMPLATE,
    URL,
    WEATHER,
    answered,
    check_whole,
    events_of,
    joined,
    refused,
    saying,
    text_of,
    until,
)

from rustvllm.server.flags.settings import ServerSettings
from rustvllm.server.schemas.responses_request import MAX_ITEMS

MANY = [{"role": "user", "content": "a"}]
USER = {"role": "user", "content": "Hi"}
BAD = [
    ({"input": None}, "input", ("string or a valid array", "null")),
    ({"input": []}, "input", ("empty list",)),
    ({"input": MANY * (MAX_ITEMS + 1)}, "input", (f"{MAX_ITEMS + 1} entries", f"limit is {MAX_ITEMS}")),
    ({"input": [{**USER, "x": [1] * 70_000}]}, "input", ("65536 values in input", "send fewer")),
    ({"input": ["Hi"]}, "input", ("input[0]", "'Hi'")),
    ({"input": [{"role": "user"}]}, "input", ("input[0].content is required",)),
    ({"input": [USER, {"role": "wizard", "content": "a"}]}, "input", ("input[1].role must be one of", "'wizard'")),
    ({"input": [{"content": "a"}]}, "input", ("input[0].type must be one of", "None")),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", ("input[0]", "stores no items")),
    ({"input": [{"type": "web_search_call", "id": "a"}]}, "input", ("input[0].type", "'web_search_call'")),
    (
        {"input": [USER, {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_image"}]}]},
        "input",
        ("input[1].content[1].image_url must be a string", "None"),
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "a"}]}]},
        "input",
        ("input[0].content[0] has the type 'input_file'", "not supported yet", "input_image"),
    ),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input", ("input[0].content[0]", "string")),
    ({"input": [{"role": "user", "content": [{"type": ["a"]}]}]}, "input", ("input[0].content[0].type",)),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "b"}]}, "input", ("input[0].arguments is required",)),
    ({"input": [{"type": "function_call_output", "output": "b"}]}, "input", ("input[0].call_id is required",)),
    ({"input": [{"type": "function_call_output", "call_id": "b"}]}, "input", ("input[0].output is required",)),
    ({"input": [{"type": "reasoning", "summary": [{"text": 3}]}]}, "input", ("input[0].summary[0]", "string")),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}},
        "tool_choice",
        ("tool_choice.tools[0] must be an object of the type function or custom", "'mcp'"),
    ),
    ({"instructions": 3}, "instructions", ("valid string", "3")),
    ({"max_output_tokens": 0}, "max_output_tokens", ("max_output_tokens must be at least 1, got 0",)),
    ({"max_output_tokens": 9999}, "max_output_tokens", ("max_output_tokens is 9999", "4000")),
    ({"temperature": 3}, "temperature", ("[0, 2]", "3")),
    ({"top_k": -2}, "top_k", ("-2",)),
    ({"top_logprobs": 50, "include": ["message.output_text.logprobs"]}, "top_logprobs", ("50", "20")),
    ({"include": ["everything"]}, "include", ("include[0]", "'everything'")),
    ({"metadata": {str(i): "a" for i in range(17)}}, "metadata", ("17 entries", "16")),
    ({"metadata": {"a" * 65: "b"}}, "metadata", ("65 characters", "64")),
    ({"metadata": {"a": "b" * 513}}, "metadata", ("512",)),
    ({"metadata": {"a": 3}}, "metadata", ("metadata['a']", "3")),
    ({"previous_response_id": "resp_1"}, "previous_response_id", ("stores no answers", "as input")),
    ({"conversation": {"id": "c"}}, "conversation", ("stores no answers",)),
    ({"background": True}, "background", ("not supported yet", "stream")),
    ({"prompt": {"id": "p"}}, "prompt", ("instructions and input",)),
    ({"messages": [USER]}, "messages", ("a field of chat completions", "input")),
    ({"max_tokens": 3}, "max_tokens", ("max_output_tokens",)),
    ({"response_format": {"type": "json_object"}}, "response_format", ("text.format",)),
    ({"n": 2}, "n", ("one answer",)),
    ({"tools": "web_search"}, "tools", ("valid array",)),
    ({"tools": [{"type": "web_search"}]}, "tools", ("tools[0].type must be function or custom", "'web_search'")),
    ({"tools": [WEATHER, {"type": "mcp", "server_url": "x"}]}, "tools", ("tools[1].type", "'mcp'")),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools", ("tools[0].name must have", "'a b'")),
    ({"tools": [{"type": "function", "function": {"name": "a"}}]}, "tools", ("tools[0].name", "None")),
    ({"tools": [{**WEATHER, "parameters": []}]}, "tools", ("tools[0].parameters must be a JSON schema",)),
    ({"tools": [{**WEATHER, "strict": "yes"}]}, "tools", ("tools[0].strict must be true or false",)),
    ({"tools": [{**WEATHER, "description": 3}]}, "tools", ("tools[0].description must be a text", "3")),
    ({"tools": [WEATHER, WEATHER]}, "tools", ("tools[1].name is 'weather', which another tool has",)),
    ({"tools": [{**PATCH, "format": {"type": "grammar"}}]}, "tools", ("tools[0].format", "not supported yet")),
    ({"tools": [WEATHER] * 1025}, "tools", ("1025", "1024")),
    ({"tool_choice": "required"}, "tool_choice", ("needs tools",)),
    ({"tools": [WEATHER], "tool_choice": "always"}, "tool_choice", ("none, auto, required", "'always'")),
    ({"tools": [WEATHER], "tool_choice": {"type": "file_search"}}, "tool_choice", ("file_search",)),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}},
        "tool_choice",
        ("tool_choice.name must be the name of one of the tools (weather), got 'x'",),
    ),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": 3}]}},
        "tool_choice",
        ("tool_choice.tools[0].name must be",),
    ),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "x", "tools": []}},
        "tool_choice",
        ("tool_choice must have mode",),
    ),
    ({"text": {"format": {"type": "xml"}}}, "text", ("text.format.type must be one of", "'xml'")),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text", ("text.format.name",)),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text", ("text.format.schema", "NoneType")),
    (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {}, "strict": 1}}},
        "text",
        ("text.format.strict",),
    ),
    (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {}, "description": 1}}},
        "text",
        ("text.format.description",),
    ),
    ({"text": {"verbosity": "loud"}}, "text", ("text.verbosity", "'loud'")),
    (
        {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        ("text.format and structured_outputs",),
    ),
    ({"reasoning": {"effort": "huge"}}, "reasoning", ("reasoning.effort", "'huge'")),
    ({"thinking_token_budget": 3}, "thinking_token_budget", ("limit the answer with max_output_tokens",)),
    ({"truncation": "some"}, "truncation", ("'auto' or 'disabled'",)),
]


@pytest.mark.parametrize(("body", "param", "says"), BAD, ids=[str(index) for index in range(len(BAD))])
async def test_what_is_refused_is_named_as_it_was_sent(body, param, says):
    await refused(body, param=param, says=says)


async def test_what_a_template_refuses_is_the_input():
    template = "{{ raise_exception('no ' + messages[0].role) }}"
    await refused({"input": [USER]}, template, param="input", says=("no user",))


async def test_a_model_whose_calls_the_server_cannot_read_takes_tools_and_no_choice():
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    says = ("--tool-call-parser",)
    await refused({"tools": [WEATHER], "tool_choice": "required"}, template, param="tool_choice", says=says)
    async with saying("Yes.", template) as (client, _):
        assert text_of(await answered(client, tools=[WEATHER])) == "Yes."


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
PARTS = st.fixed_dictionaries(
    {}, optional={"type": st.sampled_from(["input_text", "output_text", "refusal", "x"]), "text": JSON_VALUES}
)
KINDS = ["message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "x"]
ITEMS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(KINDS) | JSON_VALUES,
        "role": st.sampled_from(["user", "assistant", "system"]) | JSON_VALUES,
        "content": st.text(max_size=4) | st.lists(PARTS, max_size=2) | JSON_VALUES,
        "summary": st.lists(PARTS, max_size=2) | JSON_VALUES,
        **{name: st.text(max_size=4) | JSON_VALUES for name in ("call_id", "name", "arguments", "input", "output")},
    },
)
SOME_TOOLS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["function", "custom"]) | JSON_VALUES,
        **dict.fromkeys(("name", "description", "parameters", "strict", "format"), JSON_VALUES),
    },
)
BODIES = st.fixed_dictionaries(
    {"input": st.just("Hi") | st.lists(ITEMS, max_size=4) | JSON_VALUES},
    optional={
        "tools": st.lists(st.just(WEATHER) | SOME_TOOLS, max_size=2) | JSON_VALUES,
        "tool_choice": st.fixed_dictionaries({"type": st.just("allowed_tools"), "mode": st.just("auto")}) | JSON_VALUES,
        "text": st.fixed_dictionaries({"format": st.just({"type": "json_schema", "name": "a"}) | JSON_VALUES}),
        "stream": st.booleans(),
        **dict.fromkeys(
            (
                "instructions",
                "max_output_tokens",
                "max_tool_calls",
                "metadata",
                "include",
                "top_logprobs",
                "reasoning",
                "stream_options",
                "truncation",
                "store",
                "user",
                "service_tier",
                "parallel_tool_calls",
                "background",
                "conversation",
                "logit_bias",
                "stop",
            ),
            JSON_VALUES,
        ),
    },
)


@given(body=BODIES)
async def test_random_fields_are_answered_or_refused_and_never_break_the_server(body):
    async with serving(FakeEngine(length=3, max_model_len=64, chat_template=TEMPLATE)) as (client, _):
        content = json.dumps(body, ensure_ascii=True)
        response = await client.post(URL, content=content, headers={"Content-Type": "application/json"})
        assert response.status_code in (200, 400, 404), response.text
        if response.status_code != 200:
            error = response.json()["error"]
            assert error["message"]
            assert error["code"] == response.status_code
        elif response.headers["content-type"].startswith("text/event-stream"):
            joined(events_of(response))
        else:
            check_whole(response.json())


async def test_options_of_a_stream_need_one():
    async with saying("Yes.") as (client, _):
        body = {"input": "Hi", "stream_options": {"include_obfuscation": False}}
        assert_error(await client.post(URL, json=body), 400, "BadRequestError", param="stream_options")
        joined(events_of(await client.post(URL, json={**body, "stream": True})))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
async def test_numbers_that_json_has_not_are_never_repeated(number):
    bodies = [
        '"metadata": {"a": %s}',
        '"tools": [{"type": "function", "name": "a", "description": %s}]',
        '"tools": [{"type": "function", "name": "a", "parameters": {"default": %s}}]',
        '"text": {"format": {"type": "json_schema", "name": "a", "schema": {"default": %s}}}',
        '"text": {"format": {"type": "text", "more": %s}}',
        '"temperature": %s',
    ]
    async with saying("Yes.") as (client, _):
        for body in bodies:
            content = '{"input": "Hi", "max_output_tokens": 3, %s}' % (body % number)
            response = await client.post(URL, content=content, headers={"Content-Type": "application/json"})
            assert response.status_code in (200, 400), (body, response.text)
            json.loads(response.text, parse_constant=pytest.fail)
        body = {"input": "Hi", "tools": [{**WEATHER, "parameters": {"default": "x"}}], "tool_choice": "none"}
        content = json.dumps(body).replace('"x"', number)
        response = await client.post(URL, content=content, headers={"Content-Type": "application/json"})
        assert_error(response, 400, "BadRequestError", param="tools", says=("tools holds NaN or an infinity",))


async def test_an_engine_that_dies_in_a_stream_ends_it_as_failed():
    async with saying("Yes, really.") as (client, engine):
        engine.fail_at = 5
        response = await client.post(URL, json={"input": "Hi", "stream": True})
        events = events_of(response)
        whole = await client.post(URL, json={"input": "Hi"})
    answer = joined(events)
    assert answer["status"] == "failed"
    assert text_of(answer) == "Yes,"
    assert [item["status"] for item in answer["output"]] == ["incomplete"]
    assert answer["error"] == {"code": "server_error", "message": "the fake engine died"}
    assert answer["id"] == events[0]["response"]["id"]
    assert sum(event["type"] == "response.output_text.delta" for event in events) == 4
    assert_error(whole, 500, "InternalServerError")


async def test_an_error_before_anything_was_said_has_its_own_status():
    async with saying("Yes.") as (client, engine):
        engine.fail_at = 1
        assert_error(await client.post(URL, json={"input": "Hi", "stream": True}), 500, "InternalServerError")


async def test_an_error_behind_a_comment_and_before_anything_was_said_is_an_event():
    engine = FakeEngine(step_seconds=0.3)
    engine.fail_at = 1
    async with serving(engine, ServerSettings(sse_keep_alive_interval=0.05)) as (client, _):
        response = await client.post(URL, json={"input": "Hi", "stream": True})
    *comments, last, rest = response.text.split("\n\n")
    assert comments
    assert set(comments) == {": waiting"}
    name, data = last.split("\n")
    assert name == "event: error"
    event = json.loads(data.removeprefix("data: "))
    assert event == {
        "type": "error",
        "sequence_number": 0,
        "code": "server_error",
        "message": "the fake engine died",
        "param": None,
    }
    assert rest == ""


async def test_an_answer_that_the_server_ends_has_failed():
    engine = FakeEngine(step_seconds=0.02)
    async with serving(engine) as (client, _):
        for stream in (False, True):
            asking = asyncio.create_task(client.post(URL, json={"input": "Hi", "stream": stream}))
            await until(lambda: bool(engine.running))
            for request_id in list(engine.running):
                await engine.abort(request_id)
            response = await asking
            answer = events_of(response)[-1]["response"] if stream else response.json()
            check_whole(answer)
            assert answer["status"] == "failed"
            assert answer["error"]["code"] == "server_error"


async def test_a_client_that_leaves_ends_its_request():
    engine = FakeEngine(step_seconds=0.02, length=200)
    async with serving(engine) as (client, _):
        for stream in (False, True):
            asking = asyncio.create_task(client.post(URL, json={"input": "Hi", "stream": stream}))
            await until(lambda: bool(engine.running))
            asking.cancel()
            await until(lambda: not engine.running)
    assert len(engine.aborted) == 2


async def test_keys_and_names_hold_as_for_other_endpoints():
    async with serving(FakeEngine(length=5), ServerSettings(api_keys=("secret",))) as (client, _):
        refused_one = await client.post(URL, json={"input": "Hi"})
        assert (refused_one.status_code, refused_one.json()) == (401, {"error": "Unauthorized"})
        headers = {"Authorization": "Bearer secret", "X-Request-Id": "mine"}
        answer = (await client.post(URL, json={"input": "Hi", "model": "alias/fake"}, headers=headers)).json()
        assert (answer["model"], answer["id"]) == ("alias/fake", "resp_mine")
        unknown = await client.post(URL, json={"input": "Hi", "model": "other"}, headers=headers)
        assert_error(unknown, 404, "NotFoundError", param="model")


async def test_a_body_of_chat_hears_what_its_messages_are_called_here():
    async with serving() as (client, _):
        answer = await client.post(URL, json={"messages": [USER]})
    assert_error(answer, 400, "BadRequestError", param="messages", says=("field of chat", "a response has input"))


async def test_no_response_is_stored():
    async with serving() as (client, _):
        stored = (await client.post(URL, json={"input": "Hi", "store": True, "max_output_tokens": 3})).json()
        assert stored["store"] is False
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            answer = await client.request(method, f"{URL}/{stored['id']}{path}")
            says = (f"no response {stored['id']!r}:", "stores none")
            assert_error(answer, 404, "NotFoundError", param="response_id", says=says)
        assert_error(await client.post(f"{URL}/compact", json={}), 501, "NotImplementedError")
