"""``/v1/chat/completions`` over a fake engine: prompts from messages, shapes, events."""

import pytest
from asgi_client import assert_error, events_of, serving, without_nulls
from fake_engine import BOS, FakeEngine, expected_text

from rustvllm.server.state import ServerSettings

URL = "/v1/chat/completions"
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% if message.name %}({{ message.name }})"
    "{% endif %}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
    "{{ extra | default('') }}"
)
USER = [{"role": "user", "content": "Hi"}]
BOTH = {"add_generation_prompt": True, "continue_final_message": True}


def with_content(content):
    return {"messages": [{"role": "user", "content": content}]}


def text_of(request):
    return bytes(token for token in request.prompt_token_ids if token < 256).decode()


async def test_the_answer_has_the_shape_clients_parse():
    async with serving(FakeEngine(chat_template=TEMPLATE)) as (client, engine):
        body = (await client.post(URL, json={"model": "fake", "messages": USER, "max_tokens": 4})).json()
    length = len("<user>Hi<assistant>")
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    [choice] = body["choices"]
    message = without_nulls(choice.pop("message"))
    assert message == {"role": "assistant", "content": expected_text(length, 4)}
    assert without_nulls(choice) == {"index": 0, "finish_reason": "length"}
    assert without_nulls(body["usage"]) == {"prompt_tokens": length, "completion_tokens": 4, "total_tokens": length + 4}
    assert engine.seen[0].prompt_token_ids == list(b"<user>Hi<assistant>")


async def test_a_stream_begins_with_the_role_and_ends_with_the_reason():
    async with serving(FakeEngine(chat_template=TEMPLATE)) as (client, _):
        body = {"messages": USER, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
        events = events_of(await client.post(URL, json=body))
    length = len("<user>Hi<assistant>")
    assert all(event["object"] == "chat.completion.chunk" for event in events)
    first, *rest, usage = events
    assert first["choices"] == [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
        }
    ]
    assert [event["choices"][0]["delta"] for event in rest] == [{"content": c} for c in expected_text(length, 3)]
    assert [event["choices"][0]["finish_reason"] for event in rest] == [None, None, "length"]
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": length, "completion_tokens": 3, "total_tokens": length + 3}


async def test_n_samples_in_a_stream_interleave_by_index():
    async with serving() as (client, _):
        events = events_of(await client.post(URL, json={"messages": USER, "n": 3, "max_tokens": 5, "stream": True}))
    assert [event["choices"][0]["index"] for event in events[:3]] == [0, 1, 2]
    texts = dict.fromkeys(range(3), "")
    for event in events:
        choice = event["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert list(texts.values()) == [expected_text(3, 5, sample) for sample in range(3)]
    assert sum(event["choices"][0]["finish_reason"] is not None for event in events) == 3


async def test_without_max_tokens_an_answer_may_fill_the_model():
    async with serving(FakeEngine(max_model_len=40)) as (client, _):
        usage = (await client.post(URL, json={"messages": USER})).json()["usage"]
    assert usage["total_tokens"] == 40


async def test_max_completion_tokens_wins_and_the_models_own_limit_is_a_default():
    async with serving(FakeEngine(generation_config={"max_new_tokens": 9})) as (client, engine):
        for body in ({}, {"max_tokens": 4}, {"max_tokens": 4, "max_completion_tokens": 6}):
            await client.post(URL, json={"messages": USER, **body})
        for bad in (0, -1, 257):
            response = await client.post(URL, json={"messages": USER, "max_completion_tokens": bad})
            assert_error(response, 400, "BadRequestError", param="max_completion_tokens", says=(str(bad),))
    assert [request.params.max_tokens for request in engine.seen] == [9, 4, 6]


async def test_a_model_without_template_gets_the_plain_one():
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Bye"},
    ]
    async with serving() as (client, engine):
        await client.post(URL, json={"messages": USER})
        await client.post(URL, json={"messages": conversation})
        await client.post(
            URL, json={"messages": conversation[:3], "continue_final_message": True, "add_generation_prompt": False}
        )
    assert engine.seen[0].prompt_token_ids == [BOS, *b"Hi"]
    assert text_of(engine.seen[1]) == "system: Be brief.\nuser: Hi\nassistant: Yes?\nuser: Bye\nassistant:"
    assert text_of(engine.seen[2]) == "system: Be brief.\nuser: Hi\nassistant: Yes?"


@pytest.mark.parametrize("choice", ["auto", "none"])
async def test_a_template_of_its_own_for_tools_renders_requests_with_tools(choice, caplog):
    engine = FakeEngine(chat_template="D:{{ messages[0].content }}")
    engine.tokenizer.tool_template = "T:{{ tools|length }}:{{ messages[0].content }}<tool_call>{{ '{\"name\": 1}' }}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    async with serving(engine) as (client, _):
        assert "parsing tool calls as hermes" in caplog.text
        for extra in ({}, {"tools": tools, "tool_choice": choice}):
            answer = await client.post(URL, json={"messages": USER, "max_tokens": 1, **extra})
            assert answer.status_code == 200, answer.text
    plain, with_tools = (text_of(request) for request in engine.seen)
    assert plain.startswith("D:")
    assert with_tools.startswith("T:1:")


async def test_roles_parts_names_and_tools_reach_the_template():
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]},
        {"role": "user", "content": "Hi", "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "42", "tool_call_id": "x"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": "<é>"}}]
    async with serving(FakeEngine(chat_template=TEMPLATE)) as (client, engine):
        response = await client.post(URL, json={"messages": messages, "tools": tools, "max_tokens": 1})
    assert response.status_code == 200, response.text
    assert text_of(engine.seen[0]) == (
        "<system>One\ntwo<user>Hi(Ann)<assistant><tool>42"
        '[{"type": "function", "function": {"name": "f", "description": "<é>"}}]<assistant>'
    )


async def test_template_variables_and_templates_of_a_request():
    async with serving(FakeEngine(chat_template=TEMPLATE)) as (client, engine):
        body = {"messages": USER, "max_tokens": 1}
        await client.post(URL, json={**body, "chat_template_kwargs": {"extra": "!"}})
        assert text_of(engine.seen[0]).endswith("<assistant>!")
        reserved = await client.post(URL, json={**body, "chat_template_kwargs": {"messages": []}})
        assert_error(reserved, 400, "BadRequestError", param="chat_template_kwargs", says=("messages",))
        refused = await client.post(URL, json={**body, "chat_template": "x"})
        assert_error(refused, 400, "BadRequestError", param="chat_template", says=("--trust-request-chat-template",))
    async with serving(settings=ServerSettings(trust_request_chat_template=True)) as (client, engine):
        await client.post(URL, json={**body, "chat_template": "own {{ messages[0].content }}"})
        assert text_of(engine.seen[0]) == "own Hi"
        broken = await client.post(URL, json={**body, "chat_template": "{% for %}"})
        assert_error(broken, 400, "BadRequestError", param="chat_template")


async def test_a_template_that_refuses_the_messages_is_the_clients_error():
    template = "{{ raise_exception('roles must alternate') }}"
    async with serving(FakeEngine(chat_template=template)) as (client, _):
        response = await client.post(URL, json={"messages": USER})
    assert_error(response, 400, "BadRequestError", param="messages", says=("roles must alternate",))


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "messages", "required"),
        ({"messages": []}, "messages", "empty"),
        ({"messages": "Hi"}, "messages", "array"),
        ({"messages": [{"content": "x"}]}, "messages", "messages[0].role"),
        (with_content(7), "messages", "messages[0].content: input should be a valid string or a valid array, got 7"),
        (with_content(["a"]), "messages", "messages[0].content[0]: input should be an object, got 'a'; a part is an"),
        (
            {"messages": USER, "prediction": {"type": "content", "content": ["a"]}},
            "prediction",
            "prediction.content[0]: input should be an object, got 'a'; a part is an object such as",
        ),
        (with_content([{"type": "image_url", "image_url": {}}]), "messages", "image_url"),
        (with_content([{"type": "input_audio"}]), "messages", "input_audio"),
        (with_content([{"type": "poem"}]), "messages", "'poem'"),
        (with_content([{"type": "text"}]), "messages", "content[0]"),
        ({"messages": USER, "tools": []}, "tools", "empty"),
        ({"messages": USER, "tools": [{}], "tool_choice": "auto"}, "tools", "tools[0].function"),
        ({"messages": USER, "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"messages": USER, "tool_choice": {"type": "function"}}, "tool_choice", "needs tools"),
        ({"messages": USER, "response_format": {"type": "xml"}}, "response_format", "text"),
        ({"messages": USER, "top_logprobs": 2}, "top_logprobs", "needs logprobs=true"),
        ({"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "is 21, but the limit is 20"),
        ({"messages": USER, "logprobs": True, "top_logprobs": -1}, "top_logprobs", "vocabulary of 258 tokens"),
        ({"messages": USER, "functions": [{}]}, "functions", "tools"),
        ({"messages": USER, "modalities": ["text", "audio"]}, "modalities", "text"),
        ({"messages": USER, **BOTH}, "continue_final_message", "both"),
    ],
)
async def test_bad_chat_requests_name_what_is_wrong(body, param, says):
    async with serving(FakeEngine(chat_template=TEMPLATE)) as (client, _):
        assert_error(await client.post(URL, json=body), 400, "BadRequestError", param=param, says=(says,))
        assert (await client.post(URL, json={"messages": USER, "max_tokens": 1})).status_code == 200


async def test_what_asks_for_nothing_is_let_through():
    neutral = {
        "response_format": {"type": "text"},
        "logprobs": False,
        "top_logprobs": 0,
        "tool_choice": "none",
        "modalities": ["text"],
        "functions": None,
        "use_beam_search": False,
        "guided_json": None,
        "user": "user-1",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "stream": False,
        "stream_options": None,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "n": 1,
        "stop": None,
    }
    async with serving() as (client, _):
        response = await client.post(URL, json={"messages": USER, "max_tokens": 1, **neutral})
    assert response.status_code == 200, response.text


async def test_without_a_tokenizer_chat_is_refused():
    async with serving(FakeEngine(tokenizer=False)) as (client, _):
        assert_error(await client.post(URL, json={"messages": USER}), 400, "BadRequestError", says=("tokenizer",))
