"""Tools and thoughts over HTTP: what requests are refused, and what answers become, with an engine that says a text."""

import json
import re

import pytest
from asgi_client import assert_error, events_of, serving
from fake_engine import FakeEngine
from message_deltas import joined, without_ids

from rustvllm import _core
from rustvllm.server.flags.settings import ServerSettings

URL = "/v1/chat/completions"
TEMPLATE = (
    "{{ tools | tojson if tools else '' }}{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if message.tool_calls %}<tool_call>{{ message.tool_calls[0].function | tojson }}</tool_call>{% endif %}"
    "{{ message.reasoning_content or '' }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
MESSAGES = [{"role": "user", "content": "Hi"}]


def tool(name, parameters=None, **fields):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [tool("weather", CITY), tool("time")]
NAMED = {"type": "function", "function": {"name": "weather"}}
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)


def saying(text, template=TEMPLATE, **settings):
    engine = FakeEngine(chat_template=template, max_model_len=4000)
    engine.says = text
    return serving(engine, ServerSettings(**settings))


async def answered(client, **fields):
    """The choice of a whole answer, and the same of a stream put together, which must say the same."""
    body = {"messages": MESSAGES, "max_tokens": 1000, **fields}
    whole = await client.post(URL, json=body)
    assert whole.status_code == 200, whole.text
    [choice] = whole.json()["choices"]
    # Fields in which nothing is said are null in a whole answer, and absent from a stream.
    said = {name: value for name, value in choice["message"].items() if value is not None or name == "content"}
    events = events_of(await client.post(URL, json={**body, "stream": True}))
    message, end = joined(events)
    assert (message, end) == (without_ids(said), choice["finish_reason"])
    return said, end


async def test_calls_become_tool_calls_whole_and_streamed():
    async with saying(CALLS) as (client, _):
        message, end = await answered(client, tools=TOOLS)
    assert end == "tool_calls"
    assert message["content"] == "Let me see."
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(re.fullmatch("call_[A-Za-z0-9]{24}", call_id) for call_id in ids)
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions == [{"name": "weather", "arguments": '{"city": "Paris"}'}, {"name": "time", "arguments": "{}"}]


async def test_the_stream_of_a_call_is_name_then_arguments_then_the_end():
    async with saying('<tool_call>{"name": "time", "arguments": {"a": 1}}</tool_call>') as (client, _):
        body = {"messages": MESSAGES, "tools": TOOLS, "stream": True, "max_tokens": 100}
        choices = [event["choices"][0] for event in events_of(await client.post(URL, json=body))]
    first = choices[1]["delta"]["tool_calls"][0]
    assert first["function"] == {"name": "time", "arguments": ""}
    pieces = [choice["delta"]["tool_calls"][0]["function"]["arguments"] for choice in choices[2:-1]]
    assert len(pieces) > 3, "the arguments come as they are said"
    assert "".join(pieces) == '{"a": 1}'
    assert choices[-1] == {**choices[-1], "delta": {}, "finish_reason": "tool_calls"}


async def test_logprobs_and_ids_are_in_the_chunks_of_calls():
    async with saying(CALLS) as (client, _):
        body = {"messages": MESSAGES, "tools": TOOLS, "stream": True, "return_token_ids": True, "max_tokens": 1000}
        body["stream_options"] = {"include_usage": True}
        events = events_of(await client.post(URL, json=body))
    ids = [token for event in events for choice in event["choices"] for token in choice.get("token_ids", ())]
    assert bytes(ids).decode() == CALLS
    assert events[-1]["usage"]["completion_tokens"] == len(CALLS)


async def test_one_call_is_passed_on_where_more_are_not_wanted():
    async with saying(CALLS) as (client, _):
        message, end = await answered(client, tools=TOOLS, parallel_tool_calls=False)
    assert end == "tool_calls"
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]
    assert message["content"] == "Let me see.", "nothing behind it either"


async def test_an_answer_is_ended_behind_its_first_call_where_no_second_one_is_wanted():
    async with saying(CALLS) as (client, engine):
        for stream in (False, True):
            body = {**HEAD, "stream": stream}
            await client.post(URL, json={**body, "tools": TOOLS, "parallel_tool_calls": False})
            await client.post(URL, json={**body, "tools": TOOLS})
            await client.post(URL, json={**body, "parallel_tool_calls": False})
            must = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
            await client.post(URL, json={**body, **must})
    ended, *others = engine.call_readings[::4], *engine.call_readings[1::4], *engine.call_readings[2::4]
    assert len(engine.call_readings) == 8
    assert all(isinstance(reading, _core.TurnReading) for reading in ended)
    assert others == [None] * 4
    assert engine.call_readings[3::4] == [None] * 2, "its grammar ends it"


async def test_a_cut_call_stays_and_the_end_is_length():
    async with saying(CALLS) as (client, _):
        message, end = await answered(client, tools=TOOLS, max_tokens=CALLS.index(': "Paris"'))
    assert end == "length"
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city"'}


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
async def test_without_tools_calls_are_text(fields):
    async with saying(CALLS) as (client, engine):
        message, end = await answered(client, **fields)
    assert message == {"role": "assistant", "content": CALLS}
    assert end == "stop"
    assert ("weather" in engine.seen[0].prompt) == ("tools" in fields)


async def test_tools_are_hidden_where_none_may_be_called():
    async with saying("Yes", exclude_tools_when_tool_choice_none=True) as (client, engine):
        await answered(client, tools=TOOLS, tool_choice="none")
        await answered(client, tools=TOOLS)
    assert ["weather" in seen.prompt for seen in engine.seen] == [False, False, True, True]


async def test_a_named_choice_ends_by_stop_and_what_must_be_called_has_a_grammar():
    async with saying(CALLS) as (client, engine):
        _, named = await answered(client, tools=TOOLS, tool_choice=NAMED)
        _, required = await answered(client, tools=TOOLS, tool_choice="required")
        allowed = {"mode": "required", "tools": [NAMED]}
        await answered(client, tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
        await answered(client, tools=TOOLS)
    assert (named, required) == ("stop", "tool_calls")
    grammars = [seen.params.structured_outputs for seen in engine.seen[::2]]
    assert [None if it is None else ("weather" in it.grammar, "time" in it.grammar) for it in grammars] == [
        (True, False),
        (True, True),
        (True, False),
        (True, True),
    ]
    assert "(text calls)* tail\n" in grammars[-1].grammar, "free, but for calls"


@pytest.mark.parametrize("constraint", ["off", "syntax", "schema"])
async def test_calls_that_are_free_obey_what_the_flag_says(constraint):
    loose = [tool("weather", {**CITY, "title": "where", "not": {"title": "never"}})]
    async with saying(CALLS, tool_call_constraint=constraint) as (client, engine):
        await answered(client, tools=loose)
        free = await client.post(URL, json={**HEAD, "tools": loose})
    assert free.headers.get("x-unenforced-schema") == ("weather#/not" if constraint == "schema" else None)
    wanted = engine.seen[0].params.structured_outputs
    if constraint == "off":
        assert wanted is None
        return
    grammar = _core.GrammarSpec("grammar", wanted.text_grammar)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": 1}}\n</tool_call>'
    assert grammar.accepts("Free text.")
    assert grammar.accepts(call.replace("1", '"Rome"'))
    assert not grammar.accepts(call.replace("weather", "other"))
    assert grammar.accepts(call) is (constraint == "syntax")


async def test_a_tool_that_a_format_cannot_be_held_to_is_free_unless_it_is_strict():
    odd = {"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
    async with saying("Yes", tool_call_parser="qwen3_coder", tool_call_constraint="schema") as (client, engine):
        await answered(client, tools=[tool("f", odd)])
        response = await client.post(URL, json={**HEAD, "tools": [tool("f", odd, strict=True)]})
        assert_error(response, 400, "BadRequestError", param="tools", says=("anyOf of all parameters",))
    grammar = _core.GrammarSpec("grammar", engine.seen[0].params.structured_outputs.text_grammar)
    assert grammar.accepts("<tool_call>\n<function=f>\n<parameter=c>\n1\n</parameter>\n</function>\n</tool_call>")


async def test_the_core_makes_the_chunks_of_what_is_read_unless_they_hold_more():
    async with saying(CALLS) as (client, engine):
        body = {"messages": MESSAGES, "stream": True, "max_tokens": 9}
        usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        fields = [{"tools": TOOLS}, {}, {"tools": TOOLS, "return_token_ids": True}, {"tools": TOOLS, **usage}]
        for more in fields:
            await client.post(URL, json=body | more)
    first, thoughts, *others = engine.sinks
    assert others == [None, None]
    assert isinstance(first.turn_reading, _core.TurnReading)
    assert isinstance(thoughts.turn_reading, _core.TurnReading), "the model may think"
    before, after = first.templates[0]
    event = json.loads((before + b',"delta":{}' + after).removeprefix(b"data: "))
    assert event["choices"][0]["delta"] == {}
    first.note_calls(0, 3)


@pytest.mark.parametrize(
    ("field", "names"), [("reasoning", {"reasoning"}), ("reasoning_content", {"reasoning_content"})]
)
async def test_thoughts_are_in_the_field_that_the_flag_names(field, names):
    async with saying("<think>Hm</think>Yes.", reasoning_field=field) as (client, _):
        body = {"messages": MESSAGES, "max_tokens": 100}
        [choice] = (await client.post(URL, json=body)).json()["choices"]
        events = events_of(await client.post(URL, json=body | {"stream": True}))
    said = {name: value for name, value in choice["message"].items() if value is not None}
    assert said == {"role": "assistant", "content": "Yes."} | dict.fromkeys(names, "Hm")
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert set().union(*deltas) == {"role", "content"} | names


async def test_strict_tools_and_json_have_grammars_with_a_free_choice():
    strict = [tool("weather", {**CITY, "additionalProperties": False}, strict=True)]
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "title": "answer"}}}
    async with saying(CALLS) as (client, engine):
        await answered(client, tools=strict)
        await answered(client, tools=TOOLS, response_format=schema)
        await answered(client, tools=TOOLS, response_format={"type": "json_object"})
    grammars = [seen.params.structured_outputs.grammar for seen in engine.seen[::2]]
    assert "(text calls)* tail\n" in grammars[0]
    assert all("(calls | answer)\n" in grammar for grammar in grammars[1:])
    assert '"title":"answer"' in grammars[1]


def nested(depth):
    return {"items": nested(depth - 1)} if depth else {}


HEAD = {"messages": MESSAGES, "max_tokens": 4}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": []}, "tools", "empty"),
        ({"tool_choice": "auto"}, "tool_choice", "needs tools"),
        ({"tool_choice": NAMED}, "tool_choice", "needs tools"),
        ({"tools": [{"type": "retrieval"}]}, "tools", "tools[0].type must be 'function', got 'retrieval'"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0].function must be an object"),
        ({"tools": [tool("a b")]}, "tools", "tools[0].function.name must have 1 to 64"),
        ({"tools": [tool("x" * 65)]}, "tools", "tools[0].function.name must have 1 to 64"),
        ({"tools": [tool("a"), tool("a")]}, "tools", "tools[1].function.name is 'a', which another"),
        ({"tools": [tool("a", [1])]}, "tools", "tools[0].function.parameters must be"),
        ({"tools": [tool("a", strict=1)]}, "tools", "tools[0].function.strict must be"),
        ({"tools": [tool(f"f{i}") for i in range(1025)]}, "tools", "1025 entries; the limit is 1024"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "none, auto, required"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "tool_choice.function.name must be the name of one of the tools (weather, time), got 'x'",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "none"}}},
            "tool_choice",
            "must have mode",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
            "send only one of them",
        ),
        ({"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "structured_outputs", "only ask for JSON"),
        (
            {"tools": [tool("f", {"properties": {"a": {"not": {}}}}, strict=True)], "tool_choice": "required"},
            "tools",
            '"f" cannot be enforced: /properties/a/not is not supported',
        ),
        ({"tools": [tool("f", {"not": {}}, strict=True)]}, "tools", "/not is not supported"),
        ({"tools": [tool("f", {"type": "array"})], "tool_choice": "required"}, "tools", 'type "array", not object'),
        ({"tools": [tool("f", nested(140))]}, "tools", "cannot be read"),
        (
            {"tools": [tool("f", {"properties": {"a": {"enum": []}}, "required": ["a"]})], "tool_choice": "required"},
            "tools",
            "",
        ),
        ({"tools": [tool("f", {"description": "x" * (1 << 20)})], "tool_choice": "required"}, "tools", "1048576"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_wrong_tools_are_refused_by_name(fields, param, says, stream):
    async with saying("never") as (client, engine):
        body = json.dumps({**HEAD, **fields, "stream": stream})
        response = await client.post(URL, content=body, headers={"Content-Type": "application/json"})
        assert_error(response, 400, "BadRequestError", param=param, says=(says,))
    assert not engine.seen


async def test_what_is_left_out_of_tools_that_are_not_strict_is_in_a_header():
    loose = {"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 3}}}, "required": ["a"]}
    body = {**HEAD, "tools": [tool("f", loose)], "max_tokens": 1000}
    async with saying('<tool_call>\n{"name": "f", "arguments": {"a": 3}}\n</tool_call>') as (client, _):
        for stream in (False, True):
            required = await client.post(URL, json={**body, "tool_choice": "required", "stream": stream})
            assert required.headers["x-unenforced-schema"] == "f#/properties/a/not"
        free = await client.post(URL, json=body)
        assert "x-unenforced-schema" not in free.headers, "nothing had to be enforced"


async def test_without_a_format_tools_are_shown_and_a_choice_is_refused():
    plain = "{{ tools | tojson if tools else '' }}{{ messages[0].content }}"
    async with saying(CALLS, plain) as (client, engine):
        message, _ = await answered(client, tools=TOOLS)
        refused = await client.post(URL, json={**HEAD, "tools": TOOLS, "tool_choice": "auto"})
        assert_error(refused, 400, "BadRequestError", param="tool_choice", says=("--tool-call-parser", "hermes"))
    assert message["content"] == CALLS
    assert "weather" in engine.seen[0].prompt
    async with saying(CALLS, plain, tool_call_parser="hermes") as (client, _):
        message, _ = await answered(client, tools=TOOLS)
    assert len(message["tool_calls"]) == 2
    async with saying(CALLS, tool_call_parser="none") as (client, _):
        message, _ = await answered(client, tools=TOOLS)
    assert message["content"] == CALLS


async def test_thoughts_are_apart_from_the_answer_and_may_be_left_out():
    text = "<think>\nHm\n</think>\n\nYes."
    async with saying(text) as (client, _):
        message, end = await answered(client)
        hidden, _ = await answered(client, include_reasoning=False)
    assert (message, end) == (
        {"role": "assistant", "content": "Yes.", "reasoning": "Hm", "reasoning_content": "Hm"},
        "stop",
    )
    assert hidden == {"role": "assistant", "content": "Yes."}
    async with saying(text, reasoning_parser="none") as (client, _):
        message, _ = await answered(client)
    assert message["content"] == text


async def test_thoughts_begin_where_the_flag_or_the_prompt_says():
    async with saying("Hm</think>Yes.", reasoning_parser="deepseek_r1") as (client, _):
        message, _ = await answered(client)
        assert (message["reasoning"], message["content"]) == ("Hm", "Yes.")
        message, _ = await answered(client, reasoning_effort="none")
        assert "reasoning" not in message, "the prompt says that the thoughts have ended"
        alone, end = await answered(client, max_tokens=2)
    assert (alone["content"], alone["reasoning"], end) == (None, "Hm", "length")


async def test_thoughts_reach_templates_that_call_them_thinking():
    template = (
        "{% for message in messages %}<{{ message.role }}>{{ message.thinking or '' }}|{{ message.content or '' }}"
        "{% if message.thinking and message.content and message.tool_calls %}{{ raise_exception('both') }}{% endif %}"
        "{% endfor %}"
    )
    call = {"id": "x", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    thought = {"role": "assistant", "reasoning_content": "Hm"}
    messages = [
        *MESSAGES,
        {**thought, "content": "Yes."},
        {**thought, "tool_calls": [call]},
        {**thought, "content": "I look.", "tool_calls": [call]},
    ]
    async with saying("Yes", template) as (client, engine):
        await answered(client, messages=messages)
    assert engine.seen[0].prompt == "<user>|Hi<assistant>Hm|Yes.<assistant>Hm|<assistant>|I look."


async def test_histories_with_calls_and_thoughts_reach_the_template():
    call = {"id": "x", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "reasoning": "Hm", "tool_calls": [call]},
        {"role": "tool", "content": "Sun", "tool_call_id": "x"},
    ]
    async with saying("Yes") as (client, engine):
        await answered(client, messages=messages)
    assert engine.seen[0].prompt == (
        '<user>Hi<assistant><tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>Hm<tool>Sun'
    )
