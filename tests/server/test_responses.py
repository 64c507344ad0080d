"""``POST /v1/responses`` with an engine that says a text: what the model reads, items and events."""

import pytest
from asgi_client import serving
from fake_engine import expected_text
from response_stream import CITY, PATCH, URL, WEATHER, answered, events_of, joined, refused, saying, text_of

from rustvllm import _core

TIME = {"type": "function", "name": "time", "parameters": None, "strict": None}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
PATCHED = '<tool_call>\n{"name": "patch", "arguments": {"input": "a \\"b\\"\\n\\u00e9"}}\n</tool_call>'


async def prompt_of(body):
    """What the model reads of a body."""
    async with saying("Yes.") as (client, engine):
        response = await client.post(URL, json={"max_output_tokens": 9, **body})
        assert response.status_code == 200, response.text
    return engine.seen[0].prompt


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


async def test_the_request_of_a_coding_agent_is_served():
    """What Codex sends, with the fields that have no effect here."""
    body = {
        "model": "fake",
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        ],
        "tools": [{**WEATHER, "strict": False}, PATCH],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "text": {"verbosity": "low"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199c7a2",
        "service_tier": "auto",
        "max_tool_calls": 3,
    }
    async with saying(CALL) as (client, _):
        answer = await answered(client, **body)
    assert [item["type"] for item in answer["output"]] == ["function_call"]
    assert answer["reasoning"] == {"effort": "medium", "summary": "auto"}
    assert answer["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert (answer["max_tool_calls"], answer["service_tier"]) == (3, "default")


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


async def test_half_of_a_character_in_a_custom_tools_input_ends_no_answer():
    """JSON can escape it, UTF-8 cannot express it."""
    async with saying(PATCHED.replace("00e9", "d83d")) as (client, _):
        answer = await answered(client, tools=[PATCH])
    assert answer["output"][0]["input"] == 'a "b"\n\ufffd'


async def test_what_a_stream_repeats_of_a_large_request_comes_in_pieces():
    """An event of megabytes, made and sent in one go, would hold up the others for as long."""
    tools = [{**WEATHER, "description": "long " * 400_000}, *({**TIME, "name": f"a{index}"} for index in range(999))]
    async with saying("Yes.", "{{ messages[0].content }}") as (client, _):
        app, sizes = client._transport.app, []

        async def noting(scope, receive, send):
            async def note(message):
                sizes.append(len(message.get("body", b"")))
                await send(message)

            await app(scope, receive, note)

        client._transport.app = noting
        body = {"input": "Hi", "stream": True, "tools": tools, "tool_choice": "none"}
        answer = joined(events_of(await client.post(URL, json=body)))
    assert len(answer["tools"]) == 1000
    assert text_of(answer) == "Yes."
    assert sum(sizes) > 6_000_000, "the first two events and the last one repeat the tools"
    assert max(sizes) <= 512 << 10


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


async def test_a_plain_text_is_what_the_engine_says():
    async with serving() as (client, _):
        answer = await answered(client, max_output_tokens=9)
    assert text_of(answer) == expected_text(3, 9)
