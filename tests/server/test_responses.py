"""``POST /v1/responses`` with an engine that says a text: items, events, and what is refused in whose words."""

import asyncio
import json

import pytest
from asgi_client import assert_error, serving
from fake_engine import FakeEngine, expected_text
from hypothesis import given
from hypothesis import strategies as st
from response_stream import URL, check_whole, events_of, joined, text_of, without_ids

from rustvllm import _core
from rustvllm.server.flags.settings import ServerSettings
from rustvllm.server.schemas.responses_request import MAX_ITEMS

TEMPLATE = (
    "{{ tools | tojson if tools else '' }}{% for message in messages %}<{{ message.role }}>"
    "{{ '[' + message.reasoning + ']' if message.reasoning else '' }}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ '#' + message.tool_call_id if message.tool_call_id else '' }}{% endfor %}"
    "{{ '<assistant>' if add_generation_prompt else '' }}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "description": "The weather.", "parameters": CITY}
TIME = {"type": "function", "name": "time", "parameters": None, "strict": None}
PATCH = {"type": "custom", "name": "patch", "description": "Change a file."}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
PATCHED = '<tool_call>\n{"name": "patch", "arguments": {"input": "a \\"b\\"\\n\\u00e9"}}\n</tool_call>'


def saying(text, template=TEMPLATE, **settings):
    engine = FakeEngine(chat_template=template, max_model_len=4000)
    engine.says = text
    return serving(engine, ServerSettings(**settings))


async def answered(client, **fields):
    """A whole answer, and the same of a stream, which must say the same."""
    body = {"input": "Hi", "max_output_tokens": 1000, **fields}
    whole = await client.post(URL, json=body)
    assert whole.status_code == 200, whole.text
    answer = whole.json()
    check_whole(answer)
    streamed = joined(events_of(await client.post(URL, json={**body, "stream": True})))
    assert without_ids(streamed) == without_ids(answer)
    ids = [item["id"] for item in answer["output"]]
    assert len(set(ids)) == len(ids)
    return answer


async def until(condition):
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("it never came to that")


async def prompt_of(body):
    """What the model reads of a body."""
    async with saying("Yes.") as (client, engine):
        response = await client.post(URL, json={"max_output_tokens": 9, **body})
        assert response.status_code == 200, response.text
    return engine.seen[0].prompt


async def refused(body, template=TEMPLATE, **kinds):
    """Whole and streamed, a body is refused in the same words."""
    async with saying("Yes.", template) as (client, engine):
        for stream in (False, True):
            response = await client.post(URL, json={"input": "Hi", **body, "stream": stream})
            assert_error(response, 400, "BadRequestError", **kinds)
    assert not engine.seen


# -- the way in ---------------------------------------------------------------------------------------------------


async def test_a_text_is_the_users_and_instructions_come_before_it():
    assert await prompt_of({"input": "Hi"}) == "<user>Hi<assistant>"
    assert await prompt_of({"input": "Hi", "instructions": "Be kind."}) == "<system>Be kind.<user>Hi<assistant>"


async def test_what_the_assistant_thought_said_and_called_in_a_row_is_one_message():
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Paris"}'},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": 'a "b"'},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "done"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "content": "Yes."},
    ]
    prompt = await prompt_of({"input": items})
    assert prompt == (
        "<system>Be kind.<user>Weather?<assistant>[Hm]Let me see."
        '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
        '<tool_call>{"name": "patch", "arguments": {"input": "a \\"b\\""}}</tool_call>'
        "<tool>sun#c1<tool>done#c2<assistant>No.<assistant>Yes.<assistant>"
    )


async def test_thoughts_are_read_from_their_summary_and_left_out_where_only_their_author_can_read_them():
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "In short"}]}
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": "xyz"}
    user, said = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}
    assert await prompt_of({"input": [user, summary, said]}) == "<user>Hi<assistant>[In short]Yes.<assistant>"
    assert await prompt_of({"input": [user, sealed, said]}) == "<user>Hi<assistant>Yes.<assistant>"
    await refused({"input": [sealed]}, param="input", says=("neither content nor summary",))


async def test_a_last_message_that_was_cut_short_goes_on():
    open_item = {"type": "message", "role": "assistant", "status": "incomplete", "content": "Once"}
    assert await prompt_of({"input": [{"role": "user", "content": "Hi"}, open_item]}) == "<user>Hi<assistant>Once"
    closed = {**open_item, "status": "completed"}
    prompt = await prompt_of({"input": [{"role": "user", "content": "Hi"}, closed]})
    assert prompt == "<user>Hi<assistant>Once<assistant>"


async def test_fields_become_sampling_parameters_under_their_names():
    asked = {
        "max_output_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "seed": 3,
        "stop": ["x"],
        "stop_token_ids": [5],
        "ignore_eos": True,
        "logit_bias": {"5": 1},
        "include": ["reasoning.encrypted_content"],
        "top_logprobs": 2,
    }
    async with saying("Yes.") as (client, engine):
        await client.post(URL, json={"input": "Hi", **asked})
    [seen] = engine.seen
    params = seen.params
    assert seen.max_tokens == 7
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 5, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.1, 0.2, 1.1)
    assert (params.seed, params.ignore_eos) == (3, True)
    assert list(params.stop_strings) == ["x"]


async def test_a_prompt_that_is_too_long_is_cut_only_where_truncation_says_so():
    long = "a" * 5000
    await refused({"input": long}, param="input_tokens", says=("set truncation to auto",))
    async with saying("Yes.") as (client, engine):
        answer = await client.post(URL, json={"input": long, "truncation": "auto", "max_output_tokens": 5})
    assert answer.status_code == 200, answer.text
    assert len(engine.seen[0].prompt_token_ids) < 4000
    assert answer.json()["truncation"] == "auto"


async def test_effort_reaches_the_template():
    assert (await prompt_of({"input": "Hi", "reasoning": {"effort": "none"}})).endswith("<think></think>")
    assert not (await prompt_of({"input": "Hi", "reasoning": {"effort": "low"}})).endswith("<think></think>")


async def test_the_user_is_charged_under_either_name():
    async with saying("Yes.") as (client, engine):
        for fields in ({"user": "a"}, {"safety_identifier": "a"}, {"user": "b", "safety_identifier": "a"}, {}):
            await client.post(URL, json={"input": "Hi", **fields})
    tenants = [seen.tenant for seen in engine.seen]
    assert tenants[0] == tenants[1] == tenants[2] != tenants[3]


# -- the way out --------------------------------------------------------------------------------------------------


async def test_a_text_is_one_message_whole_and_streamed():
    async with saying("Yes, really. \u00e9") as (client, _):
        answer = await answered(client, metadata={"a": "b"}, user="u", prompt_cache_key="k")
    [item] = answer["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert text_of(answer) == "Yes, really. \u00e9"
    assert answer["id"].startswith("resp_")
    assert item["id"].startswith("msg_")
    assert (answer["status"], answer["error"], answer["incomplete_details"]) == ("completed", None, None)
    assert (answer["store"], answer["background"], answer["previous_response_id"]) == (False, False, None)
    assert (answer["metadata"], answer["user"], answer["prompt_cache_key"]) == ({"a": "b"}, "u", "k")
    assert answer["completed_at"] >= answer["created_at"]
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] == usage["input_tokens"] // 16 * 16 > 0


async def test_an_answer_that_is_cut_short_is_incomplete():
    async with saying("Yes, really.") as (client, _):
        answer = await answered(client, max_output_tokens=4)
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["completed_at"] is None
    assert answer["output"][0]["status"] == "incomplete"
    assert text_of(answer) == "Yes,"
    assert answer["usage"]["output_tokens"] == 4


async def test_calls_are_items_behind_the_text():
    async with saying(f"Let me see.\n{CALL}\n{CALL}") as (client, engine):
        answer = await answered(client, tools=[WEATHER, TIME])
        assert '"name": "weather", "description": "The weather."' in engine.seen[0].prompt
    message, *calls = answer["output"]
    assert text_of(answer) == message["content"][0]["text"] == "Let me see."
    assert [(call["type"], call["name"], call["arguments"]) for call in calls] == [
        ("function_call", "weather", '{"city": "Paris"}')
    ] * 2
    assert all(call["call_id"].startswith("call_") and call["id"].startswith("fc_") for call in calls)
    assert answer["status"] == "completed"
    assert answer["tools"][0] == {**WEATHER, "strict": False}
    assert answer["tools"][1] == {**TIME, "description": None, "strict": False}
    assert (answer["tool_choice"], answer["parallel_tool_calls"]) == ("auto", True)


async def test_arguments_come_as_they_are_said():
    async with saying(CALL) as (client, _):
        body = {"input": "Hi", "tools": [WEATHER], "stream": True, "max_output_tokens": 1000}
        events = events_of(await client.post(URL, json=body))
    pieces = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert len(pieces) > 3
    assert "".join(pieces) == '{"city": "Paris"}'


async def test_one_call_is_passed_on_where_more_are_not_wanted():
    async with saying(f"{CALL}\n{CALL}") as (client, engine):
        answer = await answered(client, tools=[WEATHER], parallel_tool_calls=False)
    assert [item["type"] for item in answer["output"]] == ["function_call"]
    assert answer["parallel_tool_calls"] is False
    assert isinstance(engine.call_readings[0], _core.TurnReading), "the engine ends the answer behind it"


async def test_a_custom_tool_is_called_with_a_text():
    async with saying(PATCHED) as (client, engine):
        answer = await answered(client, tools=[PATCH])
        assert '"properties": {"input": {"type": "string"}}' in engine.seen[0].prompt
    [call] = answer["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "patch", 'a "b"\n\u00e9')
    assert answer["tools"] == [{**PATCH, "format": {"type": "text"}}]


async def test_a_call_that_is_cut_short_shows_what_there_is_of_it():
    cut = PATCHED.index(" \\")
    async with saying(PATCHED) as (client, _):
        answer = await answered(client, tools=[PATCH], max_output_tokens=cut)
    assert answer["output"][0]["input"] == "a"
    async with saying(CALL) as (client, _):
        answer = await answered(client, tools=[WEATHER], max_output_tokens=CALL.index(': "Paris"'))
    assert answer["status"] == answer["output"][0]["status"] == "incomplete"
    assert answer["output"][0]["arguments"] == '{"city"'


@pytest.mark.parametrize(
    ("choice", "shown"),
    [
        ("required", "required"),
        ({"type": "function", "name": "weather"}, {"type": "function", "name": "weather"}),
        ({"type": "custom", "name": "patch"}, {"type": "custom", "name": "patch"}),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
        ),
    ],
    ids=["required", "function", "custom", "allowed"],
)
async def test_a_choice_of_tools_makes_a_grammar_and_is_repeated(choice, shown):
    async with saying(CALL) as (client, engine):
        answer = await answered(client, tools=[WEATHER, PATCH], tool_choice=choice)
    assert answer["tool_choice"] == shown
    assert all(seen.params.structured_outputs is not None for seen in engine.seen)


async def test_without_tools_a_free_choice_is_none():
    async with saying(CALL) as (client, _):
        for fields in ({"tools": []}, {"tool_choice": "auto"}, {"tools": [], "tool_choice": "none"}):
            assert text_of(await answered(client, **fields)) == CALL


async def test_thoughts_are_an_item_of_their_own():
    async with saying("<think>\nHm\n</think>\n\nYes.") as (client, _):
        answer = await answered(client)
        hidden = await answered(client, include_reasoning=False)
    thought, message = answer["output"]
    assert (thought["type"], thought["summary"]) == ("reasoning", [])
    assert thought["id"].startswith("rs_")
    assert thought["content"][0]["type"] == "reasoning_text"
    assert thought["content"][0]["text"].strip() == "Hm"
    assert message["content"][0]["text"] == "Yes."
    assert [item["type"] for item in hidden["output"]] == ["message"]


async def test_thoughts_that_are_cut_short_are_all_there_is():
    async with saying("<think>Hm, let me think") as (client, _):
        answer = await answered(client, max_output_tokens=12)
    [thought] = answer["output"]
    assert (thought["type"], thought["status"], answer["status"]) == ("reasoning", "incomplete", "incomplete")


async def test_an_answer_of_nothing_is_an_empty_message():
    async with saying("<think></think>") as (client, _):
        answer = await answered(client)
    assert [item["type"] for item in answer["output"]] == ["message"]
    assert text_of(answer) == ""


async def test_a_format_is_repeated_and_enforced():
    form = {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}
    async with saying('{"city": "Paris"}') as (client, engine):
        answer = await answered(client, text={"format": form, "verbosity": "low"})
        await answered(client, text={"format": {"type": "json_object"}})
        await answered(client, text={"format": {"type": "text"}})
    assert answer["text"] == {"format": {**form, "description": None}, "verbosity": "low"}
    wanted = [seen.params.structured_outputs for seen in engine.seen]
    assert [one is not None for one in wanted] == [True] * 4 + [False] * 2


# -- errors -------------------------------------------------------------------------------------------------------

MANY = [{"role": "user", "content": "a"}]
USER = {"role": "user", "content": "Hi"}
BAD = [
    ({"input": None}, "input", ("string or a valid array", "null")),
    ({"input": []}, "input", ("empty list",)),
    ({"input": MANY * (MAX_ITEMS + 1)}, "input", (f"{MAX_ITEMS + 1} entries", f"limit is {MAX_ITEMS}")),
    ({"input": ["Hi"]}, "input", ("input[0]", "'Hi'")),
    ({"input": [{"role": "user"}]}, "input", ("input[0].content is required",)),
    ({"input": [USER, {"role": "wizard", "content": "a"}]}, "input", ("input[1].role must be one of", "'wizard'")),
    ({"input": [{"content": "a"}]}, "input", ("input[0].type must be one of", "None")),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", ("input[0]", "stores no items")),
    ({"input": [{"type": "web_search_call", "id": "a"}]}, "input", ("input[0].type", "'web_search_call'")),
    (
        {"input": [USER, {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_image"}]}]},
        "input",
        ("input[1].content[1]", "'input_image'", "not supported yet"),
    ),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input", ("input[0].content[0]", "string")),
    ({"input": [{"role": "user", "content": [{"type": ["a"]}]}]}, "input", ("input[0].content[0].type",)),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "b"}]}, "input", ("input[0].arguments is required",)),
    ({"input": [{"type": "function_call_output", "output": "b"}]}, "input", ("input[0].call_id is required",)),
    ({"input": [{"type": "function_call_output", "call_id": "b"}]}, "input", ("input[0].output is required",)),
    ({"input": [{"type": "reasoning", "summary": [{"text": 3}]}]}, "input", ("input[0].summary[0]", "string")),
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


async def test_an_engine_that_dies_in_a_stream_ends_it_as_failed():
    async with saying("Yes, really.") as (client, engine):
        engine.fail_at = 5
        response = await client.post(URL, json={"input": "Hi", "stream": True})
        events = events_of(response)
        whole = await client.post(URL, json={"input": "Hi"})
    assert events[-1]["type"] == "response.failed"
    answer = events[-1]["response"]
    check_whole(answer)
    assert answer["status"] == "failed"
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


async def test_no_response_is_stored():
    async with serving() as (client, _):
        stored = (await client.post(URL, json={"input": "Hi", "store": True, "max_output_tokens": 3})).json()
        assert stored["store"] is False
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            answer = await client.request(method, f"{URL}/{stored['id']}{path}")
            assert_error(answer, 404, "NotFoundError", param="response_id", says=(stored["id"], "stores none"))
        assert_error(await client.post(f"{URL}/compact", json={}), 501, "NotImplementedError")


async def test_a_plain_text_is_what_the_engine_says():
    async with serving() as (client, _):
        answer = await answered(client, max_output_tokens=9)
    assert text_of(answer) == expected_text(3, 9)
