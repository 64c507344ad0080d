"""What a model of gpt-oss says in its channels reaches clients of each API as thoughts, text and calls."""

import json

import pytest
from asgi_client import events_of, serving
from fake_engine import FakeEngine
from message_deltas import joined, without_ids

from rustvllm.engine.request.grammar_spec import make_grammar_spec
from rustvllm.server.flags.settings import ServerSettings

TEMPLATE = (
    "{% if tools %}# Tools {{ tools | tojson }}{% endif %}{% for message in messages %}<|start|>{{ message.role }}"
    "{% if message.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ message.content }}"
    "{% if not loop.last or add_generation_prompt %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
USER = {"role": "user", "content": "Hi"}
THOUGHT = "<|channel|>analysis<|message|>The user greets.<|end|><|start|>assistant"
ANSWER = THOUGHT + "<|channel|>final<|message|>Hello, you."
CALL = (
    THOUGHT + "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>analysis<|message|>Paris."
    "<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Paris"}'
)


def saying(text, **settings):
    engine = FakeEngine(chat_template=TEMPLATE, max_model_len=4000)
    engine.says = text
    return serving(engine, ServerSettings(**settings))


async def chatted(client, **fields):
    """The choice of a whole answer, and the same of a stream put together, which must say the same."""
    body = {"messages": [USER], "max_tokens": 1000, **fields}
    whole = await client.post("/v1/chat/completions", json=body)
    assert whole.status_code == 200, whole.text
    [choice] = whole.json()["choices"]
    said = {name: value for name, value in choice["message"].items() if value is not None or name == "content"}
    message, end = joined(events_of(await client.post("/v1/chat/completions", json={**body, "stream": True})))
    assert (message, end) == (without_ids(said), choice["finish_reason"])
    return said, end


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}])
async def test_thoughts_and_text_are_told_apart_in_chats(fields):
    async with saying(ANSWER) as (client, _):
        message, end = await chatted(client, **fields)
        hidden, _ = await chatted(client, include_reasoning=False, **fields)
    assert end == "stop"
    assert (message["reasoning"], message["content"]) == ("The user greets.", "Hello, you.")
    assert "reasoning" not in hidden
    assert hidden["content"] == "Hello, you."


async def test_calls_are_told_from_what_is_said_before_them_in_chats():
    async with saying(CALL) as (client, _):
        message, end = await chatted(client, tools=TOOLS)
    assert end == "tool_calls"
    assert (message["reasoning"], message["content"]) == ("The user greets.\nParis.", "Let me see.")
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}


async def test_an_answer_that_ends_in_a_head_shows_no_mark():
    for length in range(1, len(THOUGHT)):
        text = THOUGHT[:length]
        if text.count("<|") == text.count("|>"):  # marks are tokens: none is cut
            async with saying(text) as (client, _):
                message, _ = await chatted(client)
            assert "<|" not in json.dumps(message), text


async def test_a_message_that_goes_on_is_content():
    body = {"messages": [USER, {"role": "assistant", "content": "Hel"}], "max_tokens": 99, "tools": TOOLS}
    async with saying("lo.") as (client, engine):
        answer = await client.post(
            "/v1/chat/completions", json={**body, "continue_final_message": True, "add_generation_prompt": False}
        )
        assert answer.status_code == 200, answer.text
        assert engine.seen[0].prompt.endswith("<|channel|>final<|message|>Hel")
        assert engine.seen[0].params.structured_outputs is None, "a grammar would want a head"
    assert answer.json()["choices"][0]["message"]["content"] == "lo."


async def test_responses_have_items_for_thoughts_text_and_calls():
    tools = [{"type": "function", "name": "weather", "parameters": CITY}]
    async with saying(CALL) as (client, _):
        answer = (await client.post("/v1/responses", json={"input": "Hi", "tools": tools})).json()
    kinds = [item["type"] for item in answer["output"]]
    assert kinds == ["reasoning", "message", "reasoning", "function_call"]
    assert answer["output"][1]["content"][0]["text"] == "Let me see."
    assert (answer["output"][3]["name"], answer["output"][3]["arguments"]) == ("weather", '{"city": "Paris"}')


async def test_messages_have_blocks_for_thoughts_text_and_calls():
    tools = [{"name": "weather", "input_schema": CITY}]
    body = {"messages": [USER], "max_tokens": 1000, "tools": tools, "model": "fake"}
    async with saying(CALL) as (client, _):
        answer = (await client.post("/v1/messages", json=body)).json()
    blocks = [
        (block["type"], block.get("thinking", block.get("text", block.get("input")))) for block in answer["content"]
    ]
    assert [kind for kind, _ in blocks if kind != "thinking"] == ["text", "tool_use"]
    assert ("text", "Let me see.") in blocks
    assert ("tool_use", {"city": "Paris"}) in blocks
    assert "<|" not in json.dumps(answer)


async def test_tools_without_a_description_reach_the_template():
    """The published template joins texts with it."""
    shown = "{% for tool in tools or [] %}{{ '// ' + tool.function.description + tool.function.name }}{% endfor %}"
    engine = FakeEngine(chat_template=shown + TEMPLATE, max_model_len=4000)
    engine.says = ANSWER
    tools = [*TOOLS, {"type": "function", "function": {"name": "now", "description": None}}]
    async with serving(engine, ServerSettings()) as (client, _):
        answer = await client.post("/v1/chat/completions", json={"messages": [USER], "tools": tools})
    assert answer.status_code == 200, answer.text
    assert engine.seen[0].prompt.startswith("// weather// now#")


async def test_a_budget_that_no_answer_exceeds_is_taken_by_messages():
    """The marks of thoughts are several tokens here, so that none can be enforced; Claude Code sends one always."""
    body = {"messages": [USER], "max_tokens": 99, "thinking": {"type": "enabled", "budget_tokens": 98}}
    async with saying(ANSWER) as (client, _):
        answer = await client.post("/v1/messages", json=body)
        body["thinking"]["budget_tokens"] = 97
        refused = await client.post("/v1/messages", json=body)
        body["thinking"] = {"type": "adaptive"}  # as the refusal says
        adaptive = await client.post("/v1/messages", json=body)
    assert [block["type"] for block in answer.json()["content"]] == ["thinking", "text"]
    assert answer.json()["content"] == adaptive.json()["content"]
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert message.startswith("thinking.budget_tokens needs a model that marks its reasoning with single tokens")
    assert message.endswith('; set thinking to {"type": "adaptive"}, and limit the answer with max_tokens.')


SCHEMA = {"type": "object", "properties": {"legs": {"type": "integer"}}, "required": ["legs"]}
BY_SCHEMA = {"type": "json_schema", "json_schema": {"name": "legs", "schema": SCHEMA, "strict": True}}
HEAD = "<|channel|>final <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("fields", "answer", "wrong"),
    [
        ({"response_format": BY_SCHEMA}, '{"legs": 16}', '{"legs": "16"}'),
        ({"response_format": {"type": "json_object"}}, "{}", "[]"),
        ({"response_format": BY_SCHEMA, "tools": TOOLS, "tool_choice": "none"}, '{"legs": 16}', "{}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "maybe"),
        ({"structured_outputs": {"regex": "[0-9]/[0-9]"}}, "1/6", "16"),
        ({"structured_outputs": {"grammar": 'start: "a" start | "b"'}}, "aab", "aa"),
        (
            {
                "structured_outputs": {
                    "structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}
                }
            },
            "a",
            "b",
        ),
    ],
)
async def test_what_an_answer_must_be_leaves_its_thoughts_free(fields, answer, wrong):
    async with saying(THOUGHT + HEAD + answer) as (client, engine):
        message, end = await chatted(client, **fields)
    assert (message["reasoning"], message["content"], end) == ("The user greets.", answer, "stop")
    assert message["reasoning_content"] == message["reasoning"]
    for request in engine.seen:
        obeys = make_grammar_spec(request.params.structured_outputs, engine.tokenizer).accepts
        assert obeys(THOUGHT + HEAD + answer)
        assert not obeys(THOUGHT + HEAD + wrong)
        assert not obeys(answer), "the answer is a message"


async def test_an_answer_that_goes_on_obeys_from_its_first_token_on():
    body = {"messages": [USER, {"role": "assistant", "content": '{"legs"'}], "response_format": {"type": "json_object"}}
    async with saying(": 16}") as (client, engine):
        answer = await client.post(
            "/v1/chat/completions", json={**body, "continue_final_message": True, "add_generation_prompt": False}
        )
        assert answer.status_code == 200, answer.text
        assert engine.seen[0].params.structured_outputs.kind == "json_object"
    assert answer.json()["choices"][0]["message"]["content"] == ": 16}"


async def test_what_cannot_be_enforced_is_told_and_refused_as_for_other_models():
    lenient = {"type": "json_schema", "json_schema": {"name": "legs", "schema": {**SCHEMA, "not": {}}}}
    async with saying(THOUGHT + HEAD + '{"legs": 16}') as (client, _):
        told = await client.post("/v1/chat/completions", json={"messages": [USER], "response_format": lenient})
        lenient["json_schema"]["strict"] = True
        refused = await client.post("/v1/chat/completions", json={"messages": [USER], "response_format": lenient})
    assert told.headers["x-unenforced-schema"] == "/not"
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format")


async def test_schemas_of_the_other_apis_leave_thoughts_free_too():
    said = THOUGHT + HEAD + '{"legs": 16}'
    by_format = {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "legs", "schema": SCHEMA}}}
    body = {"messages": [USER], "max_tokens": 1000, "model": "fake"}
    by_config = {**body, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    async with saying(said) as (client, engine):
        response = (await client.post("/v1/responses", json=by_format)).json()
        message = (await client.post("/v1/messages", json=by_config)).json()
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    assert response["output"][1]["content"][0]["text"] == '{"legs": 16}'
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    assert message["content"][1]["text"] == '{"legs": 16}'
    assert len(engine.seen) == 2
    for request in engine.seen:
        assert make_grammar_spec(request.params.structured_outputs, engine.tokenizer).accepts(said)
