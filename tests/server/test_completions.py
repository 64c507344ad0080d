"""``/v1/completions`` over a fake engine: shapes, events, counts, ends."""

import asyncio
import json

import pytest
from asgi_client import assert_error, events_of, serving, without_nulls
from fake_engine import BOS, FakeEngine, expected_text

from rustvllm.exceptions import GrammarsFullError, QueueFullError, QueueTimeoutError, RequestFailedError
from rustvllm.server.state import ServerSettings

URL = "/v1/completions"


async def test_a_text_prompt_is_answered_in_the_shape_clients_parse():
    async with serving() as (client, engine):
        response = await client.post(URL, json={"model": "fake", "prompt": "Hello", "max_tokens": 5})
    body = response.json()
    assert body["id"].startswith("cmpl-")
    assert isinstance(body["created"], int)
    shown = without_nulls({**body, "choices": [without_nulls(choice) for choice in body["choices"]]})
    assert {key: shown[key] for key in shown if key not in ("id", "created", "system_fingerprint")} == {
        "object": "text_completion",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "text": expected_text(6, 5),
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": 6,
            "completion_tokens": 5,
            "total_tokens": 11,
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        },
    }
    assert engine.seen[0].prompt_token_ids == [BOS, *b"Hello"]


@pytest.mark.parametrize(
    ("prompt", "lengths"),
    [
        ("Hello", [6]),
        (["Hello", "Hi"], [6, 3]),
        ([1, 2, 3], [3]),
        ([[1, 2, 3], [4]], [3, 1]),
        (["x"], [2]),
    ],
)
async def test_every_shape_of_prompt(prompt, lengths):
    async with serving() as (client, _):
        body = (await client.post(URL, json={"prompt": prompt, "max_tokens": 4})).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(len(lengths)))
    assert [choice["text"] for choice in body["choices"]] == [expected_text(length, 4) for length in lengths]
    assert body["usage"]["prompt_tokens"] == sum(lengths)


async def test_max_tokens_is_16_unless_said_otherwise():
    async with serving() as (client, engine):
        for body in ({"prompt": "a"}, {"prompt": "a", "max_tokens": None}):
            usage = (await client.post(URL, json=body)).json()["usage"]
            assert usage["completion_tokens"] == 16
    assert [request.params.max_tokens for request in engine.seen] == [16, 16]


async def test_max_tokens_beyond_the_room_is_clamped_and_beyond_the_model_refused():
    async with serving(FakeEngine(max_model_len=32)) as (client, _):
        body = (await client.post(URL, json={"prompt": [1] * 30, "max_tokens": 32})).json()
        assert body["usage"]["completion_tokens"] == 2
        assert body["choices"][0]["finish_reason"] == "length"
        refused = await client.post(URL, json={"prompt": [1] * 30, "max_tokens": 33})
        assert_error(refused, 400, "BadRequestError", param="max_tokens", says=("33", "32"))


async def test_n_samples_of_two_prompts_are_numbered_prompt_first():
    async with serving() as (client, _):
        body = (await client.post(URL, json={"prompt": ["ab", "abcd"], "n": 3, "max_tokens": 4})).json()
    texts = [choice["text"] for choice in body["choices"]]
    assert texts == [expected_text(length, 4, sample) for length in (3, 5) for sample in range(3)]
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert without_nulls(body["usage"]) == {"prompt_tokens": 8, "completion_tokens": 24, "total_tokens": 32}


async def test_echo_puts_the_prompt_first():
    async with serving() as (client, _):
        text = (await client.post(URL, json={"prompt": ["Hé", "x"], "max_tokens": 3, "echo": True})).json()["choices"]
        ids = (await client.post(URL, json={"prompt": [BOS, 72, 105], "max_tokens": 3, "echo": True})).json()["choices"]
        cut = await client.post(
            URL, json={"prompt": "abcdef", "max_tokens": 1, "echo": True, "truncate_prompt_tokens": 2}
        )
    assert [choice["text"] for choice in text] == ["Hé" + expected_text(4, 3), "x" + expected_text(2, 3)]
    assert ids[0]["text"] == "Hi" + expected_text(3, 3)
    assert cut.json()["choices"][0]["text"] == "ef" + expected_text(2, 1)
    assert cut.json()["usage"]["prompt_tokens"] == 2


async def test_a_stream_has_one_choice_per_event_and_the_reason_with_the_last_text():
    async with serving() as (client, _):
        events = events_of(await client.post(URL, json={"prompt": "Hello", "max_tokens": 4, "stream": True}))
    choices = [event["choices"] for event in events]
    assert all(len(choice) == 1 for choice in choices)
    assert [choice[0] for choice in choices] == [
        {
            "index": 0,
            "text": expected_text(6, 4)[i],
            "logprobs": None,
            "finish_reason": "length" if i == 3 else None,
            "stop_reason": None,
            "prompt_token_ids": None,
            "token_ids": None,
        }
        for i in range(4)
    ]
    assert len({event["id"] for event in events}) == 1
    assert all(event["object"] == "text_completion" and event["model"] == "fake" for event in events)
    assert all("usage" not in event for event in events)


async def test_a_stream_adds_up_to_the_answer_without_a_stream():
    body = {"prompt": ["Hello", "Hi", [1]][:2], "n": 2, "max_tokens": 20, "echo": True}
    async with serving() as (client, _):
        whole = (await client.post(URL, json=body)).json()
        events = events_of(
            await client.post(URL, json={**body, "stream": True, "stream_options": {"include_usage": True}})
        )
    texts = dict.fromkeys(range(4), "")
    for event in events[:-1]:
        choice = event["choices"][0]
        texts[choice["index"]] += choice["text"]
    assert texts == {choice["index"]: choice["text"] for choice in whole["choices"]}
    finished = [event["choices"][0]["index"] for event in events[:-1] if event["choices"][0]["finish_reason"]]
    assert sorted(finished) == [0, 1, 2, 3]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == without_nulls(whole["usage"])
    assert all(event["usage"] is None for event in events[:-1])


async def test_echo_in_a_stream_sends_the_prompt_before_anything_else():
    async with serving() as (client, _):
        events = events_of(
            await client.post(URL, json={"prompt": "Hello", "max_tokens": 2, "stream": True, "echo": True})
        )
    assert [event["choices"][0]["text"] for event in events] == ["Hello", *expected_text(6, 2)]


async def test_continuous_usage_counts_up():
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with serving() as (client, _):
        events = events_of(
            await client.post(URL, json={"prompt": "ab", "max_tokens": 3, "stream": True, "stream_options": options})
        )
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 3]
    assert [event["usage"]["prompt_tokens"] for event in events] == [3] * 4


async def test_usage_flags_of_the_server():
    settings = ServerSettings(enable_force_include_usage=True, enable_prompt_tokens_details=True)
    async with serving(settings=settings) as (client, _):
        events = events_of(await client.post(URL, json={"prompt": "a" * 40, "max_tokens": 2, "stream": True}))
    assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}


async def test_text_that_json_must_escape_survives_a_stream(monkeypatch):
    awkward = 'quote " slash \\ newline \n tab \t nul \0 é 漢 😀 \u2028 </script>'
    monkeypatch.setattr("fake_engine.expected_text", lambda _, length, sample=0, start=0: awkward[start:length])
    async with serving() as (client, _):
        events = events_of(await client.post(URL, json={"prompt": "a", "max_tokens": len(awkward), "stream": True}))
    assert "".join(event["choices"][0]["text"] for event in events) == awkward


async def test_stop_finish_reason():
    async with serving(FakeEngine(length=3)) as (client, _):
        body = (await client.post(URL, json={"prompt": "a", "max_tokens": 10})).json()
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 3


async def test_names_are_echoed_as_typed_and_the_first_is_the_default():
    async with serving() as (client, _):
        names = [
            (await client.post(URL, json={**model, "prompt": "a"})).json()["model"]
            for model in ({"model": "fake"}, {"model": "alias/fake"}, {}, {"model": None})
        ]
        assert names == ["fake", "alias/fake", "fake", "fake"]
        unknown = await client.post(URL, json={"model": "gpt-9", "prompt": "a"})
        assert_error(unknown, 404, "NotFoundError", param="model", says=("`gpt-9` does not exist",))


async def test_the_clients_request_id_is_used_even_twice_at_a_time():
    async with serving(FakeEngine(step_seconds=0.001)) as (client, _):
        answers = await asyncio.gather(
            *(client.post(URL, json={"prompt": "a"}, headers={"X-Request-Id": "mine"}) for _ in range(3)),
            client.post(URL, json={"prompt": "a", "request_id": "body"}),
        )
        assert [answer.json()["id"] for answer in answers] == ["cmpl-mine"] * 3 + ["cmpl-body"]
        too_long = await client.post(URL, json={"prompt": "a", "request_id": "x" * 300})
        assert_error(too_long, 400, "BadRequestError", param="request_id", says=("256", "300"))


async def test_model_defaults_are_followed_below_what_the_request_says(caplog):
    defaults = {"temperature": 0.5, "top_k": 7, "repetition_penalty": 1.3, "max_new_tokens": 9, "unrelated": 1}
    async with serving(FakeEngine(generation_config=defaults)) as (client, engine):
        await client.post(URL, json={"prompt": "a", "top_k": 3})
    params = engine.seen[0].params
    assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 3, 16)


async def test_cache_salt_and_priority_reach_the_engine():
    async with serving(FakeEngine(policy="priority")) as (client, engine):
        assert (await client.post(URL, json={"prompt": "a", "cache_salt": "tenant", "priority": 3})).status_code == 200
        bad = await client.post(URL, json={"prompt": "a", "cache_salt": "a/b"})
        assert_error(bad, 400, "BadRequestError", param="cache_salt")
    assert (engine.seen[0].cache_salt, engine.seen[0].priority) == ("tenant", 3)
    async with serving() as (client, _):
        refused = await client.post(URL, json={"prompt": "a", "priority": 1})
        assert_error(refused, 400, "BadRequestError", param="priority", says=("1",))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("retry_after", "header"), [(None, "1"), (17, "17")])
@pytest.mark.parametrize("kind", [QueueFullError, QueueTimeoutError, GrammarsFullError])
async def test_a_full_server_is_503_with_retry_after(stream, retry_after, header, kind):
    engine = FakeEngine()
    engine.refuse = kind("65536 requests wait already")
    engine.refuse.retry_after = retry_after
    async with serving(engine) as (client, _):
        response = await client.post(URL, json={"prompt": "a", "stream": stream})
    assert_error(response, 503, "ServiceUnavailableError", says=("65536",))
    assert response.headers["retry-after"] == header


@pytest.mark.parametrize("failure", [RequestFailedError("step 7 failed"), ValueError("/secret/path")])
async def test_an_error_of_the_engine_is_500_and_in_a_stream_an_event(failure):
    engine = FakeEngine()
    engine.fail_at, engine.failure = 3, failure
    async with serving(engine, raise_unforeseen=False) as (client, _):
        whole = await client.post(URL, json={"prompt": "a"})
        assert_error(whole, 500, "InternalServerError")
        events = events_of(await client.post(URL, json={"prompt": ["a", "b"], "stream": True}))
        engine.fail_at = None
        assert (await client.post(URL, json={"prompt": "a"})).status_code == 200
    assert set(events[-1]) == {"error"}
    assert events[-1]["error"]["code"] == 500
    assert all("error" not in event for event in events[:-1])
    assert len(events) > 1
    foreseen = isinstance(failure, RequestFailedError)
    for message in (events[-1]["error"]["message"], whole.json()["error"]["message"]):
        assert ("step 7 failed" in message) is foreseen
        assert "/secret" not in message


async def test_one_bad_prompt_among_good_ones_refuses_all_and_leaves_nothing_running():
    async with serving(FakeEngine(step_seconds=0.01)) as (client, engine):
        response = await client.post(URL, json={"prompt": [[1, 2], [3, 999]], "stream": True})
        assert_error(response, 400, "BadRequestError", param="prompt", says=("999", "257"))
        assert not engine.running
        assert len(engine.aborted) == 1


async def test_without_a_tokenizer_token_ids_are_served_and_text_is_refused():
    async with serving(FakeEngine(tokenizer=False)) as (client, _):
        assert (await client.post(URL, json={"prompt": [1, 2]})).status_code == 200
        for body in ({"prompt": "text"}, {"prompt": [1], "echo": True}, {"prompt": [1], "stop": ["x"]}):
            assert_error(
                await client.post(URL, json=body),
                400,
                "BadRequestError",
                param=next(reversed(body)),
                says=("tokenizer",),
            )


async def test_two_hundred_mixed_requests_at_once_all_end_right():
    async def one(client, i):
        body = {"prompt": [1] * (i % 40 + 1), "max_tokens": i % 23 + 1, "stream": i % 2 == 0, "n": i % 3 + 1}
        response = await client.post(URL, json=body)
        expected = [expected_text(i % 40 + 1, i % 23 + 1, sample) for sample in range(i % 3 + 1)]
        if not body["stream"]:
            assert [choice["text"] for choice in response.json()["choices"]] == expected
            return
        texts = dict.fromkeys(range(body["n"]), "")
        for event in events_of(response):
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert list(texts.values()) == expected

    async with serving(FakeEngine(step_seconds=0.001)) as (client, _):
        await asyncio.gather(*(one(client, i) for i in range(200)))


async def test_the_stream_is_valid_json_with_compact_separators():
    async with serving() as (client, _):
        text = (await client.post(URL, json={"prompt": "a", "max_tokens": 1, "stream": True})).text
    payload = text.split("\n\n")[0].removeprefix("data: ")
    assert json.dumps(json.loads(payload), separators=(",", ":"), ensure_ascii=False) == payload
