"""Rows of the wire format that are about streams, and what only a stream or an answer shows on request."""

import itertools

import pytest
from asgi_client import assert_error, events_of, serving, without_nulls
from conformance_case import CHAT, COMPLETIONS, PROMPT, USER, Case, bad, join_events, run, text_of
from fake_engine import FakeEngine

from rustvllm.exceptions import EngineDeadError, RequestFailedError

OPTIONS, INTERVAL = "stream / stream_options", "stream_interval"
USAGE, ENDS = "usage in streams", "interleaved choices"
WHOLE, CHATS = "completions stream", "chat stream"
IDS, TEXTS = "return_token_ids", "return_tokens_as_token_ids"
TIMES, PROGRESS = "timings / timings_per_token", "return_progress"
LONG = {"max_tokens": 12, "ignore_eos": True}
RATES = ("prompt_per_token_ms", "prompt_per_second", "predicted_per_token_ms", "predicted_per_second")


def has_ids(answer):
    for choice in answer["choices"]:
        assert choice["token_ids"]
    assert sum(len(choice["token_ids"]) for choice in answer["choices"]) == answer["usage"]["completion_tokens"]


def has_no_ids(answer):
    assert all(choice["token_ids"] is None and choice["prompt_token_ids"] is None for choice in answer["choices"])


def shows_ids(answer):
    [choice] = answer["choices"]
    assert all(token.startswith("token_id:") for token in choice["logprobs"]["tokens"])
    assert all(token.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"] for token in top)


def has_timings(answer):
    check_timings(answer["timings"], answer["usage"])


def has_no_timings(answer):
    assert "timings" not in answer


def check_timings(timings, usage):
    assert timings["prompt_n"] + timings["cache_n"] == usage["prompt_tokens"]
    assert timings["predicted_n"] == usage["completion_tokens"]
    assert timings["prompt_ms"] > 0
    assert timings["queue_ms"] >= 0
    assert all(timings[rate] is None or timings[rate] > 0 for rate in RATES)
    assert (timings["predicted_per_second"] is None) == (timings["predicted_ms"] == 0)


CASES = [
    Case(OPTIONS, "valid", {"stream": False}),
    Case(OPTIONS, "edge", {"stream": None}, CHAT),
    Case(OPTIONS, "edge", {"stream_options": None}),
    Case(OPTIONS, "edge", {"stream_options": {}}),
    bad(OPTIONS, {"stream_options": {"include_usage": None}}, "stream_options", "stream=true"),
    bad(
        OPTIONS, {"stream": False, "stream_options": {"include_usage": True}}, "stream_options", "stream=true", url=CHAT
    ),
    bad(OPTIONS, {"stream": True, "stream_options": 1}, "stream_options", "stream_options"),
    bad(OPTIONS, {"stream": "maybe"}, "stream", "valid boolean"),
    Case(INTERVAL, "valid", {"stream_interval": 3, "n": 2, **LONG}, choices=2),
    Case(INTERVAL, "valid", {"stream_interval": 5, "logprobs": True, **LONG}, CHAT),
    Case(INTERVAL, "valid", {"stream_interval": 4, "return_token_ids": True, **LONG}, check=has_ids),
    Case(INTERVAL, "edge", {"stream_interval": None}),
    Case(INTERVAL, "edge", {"stream_interval": 1}, CHAT),
    Case(INTERVAL, "edge", {"stream_interval": 2**31 - 1, **LONG}),
    bad(INTERVAL, {"stream_interval": 0}, "stream_interval", "at least 1, got 0"),
    bad(INTERVAL, {"stream_interval": -3}, "stream_interval", "at least 1, got -3", url=CHAT),
    bad(INTERVAL, {"stream_interval": 2**31}, "stream_interval", "at most 2147483647"),
    bad(INTERVAL, {"stream_interval": 1.5}, "stream_interval", "integer"),
    bad(INTERVAL, {"stream_interval": "many"}, "stream_interval", "integer", url=CHAT),
    Case(IDS, "valid", {"return_token_ids": True, "n": 2}, choices=2, check=has_ids),
    Case(IDS, "valid", {"return_token_ids": True}, CHAT, check=has_ids),
    Case(IDS, "edge", {"return_token_ids": False}, check=has_no_ids),
    bad(IDS, {"return_token_ids": 2}, "return_token_ids", "valid boolean"),
    Case(TEXTS, "valid", {"return_tokens_as_token_ids": True, "logprobs": 2}, check=shows_ids),
    Case(TEXTS, "edge", {"return_tokens_as_token_ids": True}),
    bad(TEXTS, {"return_tokens_as_token_ids": "x"}, "return_tokens_as_token_ids", "valid boolean"),
    Case(TIMES, "valid", {"timings": True, **LONG}, check=has_timings),
    Case(TIMES, "valid", {"timings_per_token": True, "n": 2, **LONG}, CHAT, choices=2, check=has_timings),
    Case(TIMES, "valid", {"timings": True, "prompt": ["One", "Two"]}, choices=2, check=has_timings),
    Case(TIMES, "edge", {"timings": True, "max_tokens": 1}, check=has_timings),
    Case(TIMES, "edge", {"timings": True, "best_of": 3, **LONG}, check=has_timings, streams=False),
    Case(TIMES, "edge", {"timings": False}, check=has_no_timings),
    bad(TIMES, {"timings": "yes please"}, "timings", "valid boolean"),
    bad(TIMES, {"timings_per_token": 3}, "timings_per_token", "valid boolean", url=CHAT),
    Case(PROGRESS, "edge", {"return_progress": False}),
    bad(PROGRESS, {"return_progress": True}, "return_progress", "stream=true", streams=False),
    bad(PROGRESS, {"return_progress": "x"}, "return_progress", "valid boolean"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case, client):
    run(case, client)


def stream(client, url=COMPLETIONS, **body):
    base = {"messages": USER} if url == CHAT else {"prompt": PROMPT}
    return events_of(
        client.post(url, json={**base, "max_tokens": 8, "seed": 3, "ignore_eos": True, "stream": True, **body})
    )


def test_each_event_of_a_completion_has_one_choice_and_the_last_its_reason_and_text(client):
    events = stream(client, stop_token_ids=[841], temperature=0, max_tokens=9)
    assert [set(event["choices"][0]) for event in events] == [
        {"index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids"}
    ] * len(events)
    assert all(len(event["choices"]) == 1 and "usage" not in event for event in events)
    *others, last = [event["choices"][0] for event in events]
    assert all(choice["finish_reason"] is None and choice["text"] for choice in others)
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", 841)
    assert [choice["text"] for choice in others] == [",", " a", " little"]


def test_a_completion_that_ends_by_length_has_its_last_text_with_the_reason(client):
    events = stream(client, temperature=0, max_tokens=2)
    assert [event["choices"][0]["text"] for event in events] == [",", " a"]
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_an_echo_comes_first(client):
    events = stream(client, temperature=0, max_tokens=1, echo=True)
    assert [event["choices"][0]["text"] for event in events] == [PROMPT, ","]


def test_a_chat_begins_with_the_role_and_ends_with_the_reason(client):
    events = [event["choices"][0] for event in stream(client, CHAT, n=2)]
    first = {choice["index"]: choice for choice in reversed(events)}
    assert [first[index]["delta"] for index in (0, 1)] == [{"role": "assistant", "content": ""}] * 2
    others = [choice["delta"] for choice in events if choice["delta"] != {"role": "assistant", "content": ""}]
    assert all(set(delta) == {"content"} for delta in others)
    assert [choice["index"] for choice in events if choice["finish_reason"] is not None].count(0) == 1


@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
def test_choices_interleave_and_each_ends_once(client, url):
    events = [event["choices"][0] for event in stream(client, url, n=3, max_tokens=24)]
    ends = [choice["index"] for choice in events if choice["finish_reason"] is not None]
    assert sorted(ends) == [0, 1, 2]
    order = [choice["index"] for choice in events]
    switches = sum(1 for one, other in itertools.pairwise(order) if one != other)
    assert switches > 4, "they come as they are made, not one after the other"


@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
def test_usage_comes_once_at_the_end_or_with_every_event(client, url):
    once = stream(client, url, stream_options={"include_usage": True})
    assert [event["usage"] for event in once[:-1]] == [None] * (len(once) - 1)
    assert once[-1]["choices"] == []
    always = stream(client, url, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [event["usage"]["completion_tokens"] for event in always]
    assert counts == sorted(counts)
    assert counts[-1] == 8 == once[-1]["usage"]["completion_tokens"]
    never = stream(client, url, stream_options={"include_usage": False, "continuous_usage_stats": True})
    assert all("usage" not in event and event["choices"] for event in never)
    for nothing in ({}, {"include_usage": None}):
        assert all("usage" not in event for event in stream(client, url, stream_options=nothing))


@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
def test_streamed_token_ids_add_up(client, url):
    body = {"max_tokens": 6, "seed": 4, "n": 2, "return_token_ids": True}
    whole = client.post(url, json={"prompt": PROMPT, "messages": USER, **body}).json()
    events = stream(client, url, **{**body, "ignore_eos": False})
    ids = {0: [], 1: []}
    prompts = []
    for event in events:
        [choice] = event["choices"]
        ids[choice["index"]] += choice.get("token_ids") or []
        prompts += [holder["prompt_token_ids"] for holder in (event, choice) if holder.get("prompt_token_ids")]
    assert [ids[0], ids[1]] == [choice["token_ids"] for choice in whole["choices"]]
    expected = whole["prompt_token_ids"] if url == CHAT else whole["choices"][0]["prompt_token_ids"]
    assert prompts == [expected] * 2


@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
def test_timings_come_with_each_choices_end_or_with_every_text(client, url):
    options = {"stream_options": {"include_usage": True}}
    *events, last = stream(client, url, timings=True, n=2, **options)
    timed = [event for event in events if "timings" in event]
    assert [event["choices"][0]["finish_reason"] for event in timed] == ["length", "length"]
    check_timings(timed[-1]["timings"], last["usage"])
    *events, last = stream(client, url, timings_per_token=True, **options)
    texts = [
        event
        for event in events
        if event["choices"][0].get("text", event["choices"][0].get("delta", {}).get("content"))
    ]
    counts = [event["timings"]["predicted_n"] for event in texts]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"]


def test_a_prompt_in_pieces_tells_how_far_it_is(client):
    """The server computes 128 tokens a step; pieces come together in one event only when this client is slow."""
    for attempt in range(30):
        body = {"prompt": [5] * 500, "cache_salt": f"progress {attempt}", "max_tokens": 1, "return_progress": True}
        told = [event["prompt_progress"] for event in stream(client, **body) if "prompt_progress" in event]
        processed = [progress["processed"] for progress in told]
        times = [progress["time_ms"] for progress in told]
        assert set(processed) <= {128, 256, 384, 500}
        assert processed == sorted(set(processed))
        assert processed[-1] == 500
        assert times == sorted(times)
        assert {(progress["total"], progress["cache"]) for progress in told} == {(500, 0)}
        if len(processed) > 2:
            return
    raise AssertionError("no piece of a prompt came alone")


@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
def test_progress_ends_with_the_whole_prompt_and_changes_nothing_else(client, url):
    body = {"max_tokens": 5, "temperature": 0, "stream_options": {"include_usage": True}}
    plain = stream(client, url, **body)
    events = stream(client, url, return_progress=True, **body)
    told = [event for event in events if "prompt_progress" in event]
    total = events[-1]["usage"]["prompt_tokens"]
    assert told == events[: len(told)]
    assert all(event["choices"][0].get("delta", {}) == {} for event in told)
    assert [event["prompt_progress"]["total"] for event in told] == [total] * len(told)
    assert told[-1]["prompt_progress"]["processed"] == total
    rest = [event for event in events if "prompt_progress" not in event]
    assert join_events(url, rest) == join_events(url, plain)


@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("failure", [RequestFailedError("step 7 failed"), EngineDeadError("the engine died")])
async def test_an_error_half_way_is_an_event_and_the_stream_ends(url, failure):
    engine = FakeEngine()
    engine.fail_at, engine.failure = 3, failure
    body = {"prompt": PROMPT, "messages": USER, "max_tokens": 9, "stream": True}
    async with serving(engine) as (http, _):
        *events, last = events_of(await http.post(url, json=body))
        whole = await http.post(url, json={**body, "stream": False})
    assert (
        last
        == {"error": {"message": str(failure), "type": "InternalServerError", "param": None, "code": 500}}
        == whole.json()
    )
    assert all("error" not in event for event in events)
    assert events
    assert_error(whole, 500, "InternalServerError")


def test_a_stream_and_a_whole_answer_differ_in_nothing_but_their_form(client):
    body = {"prompt": [PROMPT, "Two"], "n": 2, "echo": True, "logprobs": 2, "max_tokens": 6, "seed": 8}
    whole = client.post(COMPLETIONS, json=body).json()
    streamed = join_events(
        COMPLETIONS,
        events_of(client.post(COMPLETIONS, json={**body, "stream": True, "stream_options": {"include_usage": True}})),
    )
    assert [choice["text"] for choice in streamed["choices"]] == [text_of(choice) for choice in whole["choices"]]
    assert [choice["logprobs"] for choice in streamed["choices"]] == [choice["logprobs"] for choice in whole["choices"]]
    assert streamed["usage"] == without_nulls(whole["usage"])
