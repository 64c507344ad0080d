"""Fields without anything to say are null where vLLM 0.32 sends null, whole and streamed."""

import pytest
from asgi_client import events_of, serving
from fake_engine import FakeEngine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
ANSWER = {"service_tier", "kv_transfer_params", "ec_transfer_params", "metrics"}
NULLS = {
    COMPLETIONS: {
        "": ANSWER,
        "choice": {"logprobs", "stop_reason", "token_ids", "prompt_logprobs", "prompt_token_ids", "routed_experts"},
    },
    CHAT: {
        "": {*ANSWER, "prompt_logprobs", "prompt_token_ids", "prompt_text"},
        "choice": {"logprobs", "stop_reason", "token_ids", "routed_experts"},
        "message": {"refusal", "annotations", "audio", "function_call", "reasoning"},
    },
}
"""What vLLM's response models have as null by default; its serializer leaves an empty `tool_calls` out."""
USAGE = {"prompt_tokens_details", "completion_tokens_details"}


def nulls(fields):
    return {name for name, value in fields.items() if value is None}


@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
async def test_a_whole_answer_has_vllms_nulls(url):
    async with serving() as (client, _):
        answer = (await client.post(url, json=BODY)).json()
    [choice] = answer["choices"]
    assert nulls(answer) == NULLS[url][""]
    assert nulls(choice) == NULLS[url]["choice"]
    assert nulls(answer["usage"]) == USAGE
    if url == CHAT:
        assert nulls(choice["message"]) == NULLS[url]["message"]
        assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
async def test_what_was_asked_for_takes_the_place_of_its_null(url):
    async with serving() as (client, _):
        answer = (await client.post(url, json={**BODY, "return_token_ids": True})).json()
    [choice] = answer["choices"]
    assert len(choice["token_ids"]) == 3
    assert (answer if url == CHAT else choice)["prompt_token_ids"]


@pytest.mark.parametrize("ids", [None, True])
@pytest.mark.parametrize("core", [True, False], ids=["by the core", "in Python"])
async def test_a_streamed_completion_has_the_ids_fields_in_every_event(ids, core):
    engine = FakeEngine()
    async with serving(engine) as (client, _):
        body = {**BODY, "stream": True, "return_token_ids": ids, "timings_per_token": not core}
        events = events_of(await client.post(COMPLETIONS, json=body))
    choices = [event["choices"][0] for event in events]
    assert all({"prompt_token_ids", "token_ids"} <= set(choice) for choice in choices)
    prompts = [choice["prompt_token_ids"] for choice in choices]
    generated = [choice["token_ids"] for choice in choices]
    if ids:
        assert [bool(prompt) for prompt in prompts] == [True] + [False] * (len(events) - 1)
        assert sum(len(some or []) for some in generated) == 3
    else:
        assert set(map(str, prompts + generated)) == {"None"}


@pytest.mark.parametrize("ids", [None, True])
@pytest.mark.parametrize("core", [True, False], ids=["by the core", "in Python"])
async def test_a_streamed_chat_opens_with_the_prompts_fields_and_has_ids_with_text(ids, core):
    async with serving() as (client, _):
        body = {**BODY, "stream": True, "return_token_ids": ids, "timings_per_token": not core}
        opening, *others = events_of(await client.post(CHAT, json=body))
    assert opening["choices"][0]["delta"]["role"] == "assistant"
    assert {"prompt_token_ids", "prompt_text"} <= set(opening)
    assert bool(opening["prompt_token_ids"]) is bool(ids)
    assert opening["prompt_text"] is None
    assert "token_ids" not in opening["choices"][0]
    assert all("prompt_token_ids" not in event for event in others)
    generated = [event["choices"][0]["token_ids"] for event in others]
    assert sum(len(some or []) for some in generated) == (3 if ids else 0)
    assert ids or set(generated) == {None}
    assert all(set(event["choices"][0]["delta"]) == {"content"} for event in others)
