"""Rows of the table of parameters: what a request says of itself, and what is refused by name until it is built."""

import pytest
from asgi_client import assert_error, serving
from conformance_case import CHAT, COMPLETIONS, Case, bad, run
from fake_engine import FakeEngine

IGNORED = "user, metadata, store, service_tier, unknown fields"
BEAMS = "use_beam_search, length_penalty"
TEXT = {"response_format": {"type": "text"}}
NAMELESS = {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f"],
}
SCHEMALESS = {"type": "json_schema", "json_schema": {"name": "a", "schema": "{}"}}
NEGATED = {
    "type": "json_schema",
    "json_schema": {"name": "a", "schema": {"properties": {"a": {"not": {}}}}, "strict": True},
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
UNKNOWN = {"user": "Ann", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "not_a_parameter": [1, {}]}


def id_is(expected):
    def check(answer):
        assert answer["id"] == expected

    return check


CASES = [
    Case("response_format", "valid", TEXT),
    Case("response_format", "valid", TEXT, CHAT),
    Case("response_format", "edge", {"response_format": None}),
    Case("response_format", "valid", {"response_format": {"type": "json_object"}}),
    Case("response_format", "valid", {"response_format": SCHEMA}, CHAT),
    bad(
        "response_format",
        {"response_format": {"type": "json_schema"}},
        "response_format",
        "needs a json_schema",
        url=CHAT,
    ),
    bad("response_format", {"response_format": NAMELESS}, "response_format", "json_schema.name must have 1 to 64"),
    bad(
        "response_format", {"response_format": SCHEMALESS}, "response_format", "must be an object or a boolean, got str"
    ),
    bad(
        "response_format",
        {"response_format": {"type": "xml"}},
        "response_format",
        "text, json_object, json_schema or structural_tag",
    ),
    Case("response_format", "valid", {"response_format": TAG}),
    bad(
        "response_format",
        {"response_format": {"type": "structural_tag"}},
        "response_format",
        "must be a list with at least one entry",
    ),
    bad("response_format", {"response_format": {**TAG, "format": {}}}, "response_format", "has the type None"),
    bad(
        "response_format",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": 1}}},
        "response_format",
        "json_schema.strict must be true or false, got 1",
    ),
    bad("response_format", {"response_format": "json"}, "response_format", "input should be an object"),
    bad("response_format", {"response_format": NEGATED}, "response_format", "/properties/a/not is not supported"),
    Case("structured_outputs", "valid", {"structured_outputs": {"regex": "a*"}}),
    Case("structured_outputs", "valid", {"structured_outputs": {"choice": ["a", "b"], "regex": None}}, CHAT),
    Case("structured_outputs", "edge", {"structured_outputs": None}),
    bad(
        "structured_outputs",
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        "structured_outputs",
        "exactly one of",
    ),
    bad(
        "structured_outputs",
        {"structured_outputs": {"regexp": "a"}},
        "structured_outputs",
        "has the unknown field regexp",
    ),
    bad("structured_outputs", {"structured_outputs": {"choice": []}}, "structured_outputs", "one or more texts"),
    bad("structured_outputs", {"structured_outputs": {"json_object": False}}, "structured_outputs", "must be true"),
    bad(
        "structured_outputs",
        {"structured_outputs": {"structural_tag": "{}"}},
        "structured_outputs",
        "structures of a structural_tag must be a list",
    ),
    bad(
        "structured_outputs",
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "send only one of them",
    ),
    Case("priority", "valid", {"priority": 0}),
    Case("priority", "edge", {"priority": None}, CHAT),
    bad("priority", {"priority": 1}, "priority", "priority is 1", "scheduling_policy='priority'"),
    bad("priority", {"priority": -1}, "priority", "priority is -1", url=CHAT),
    bad("priority", {"priority": "high"}, "priority", "valid integer", "'high'"),
    Case("cache_salt", "valid", {"cache_salt": "tenant-1"}),
    Case("cache_salt", "edge", {"cache_salt": "x" * 128}, CHAT),
    Case("cache_salt", "edge", {"cache_salt": None}),
    bad("cache_salt", {"cache_salt": ""}, "cache_salt", "1 to 128 characters"),
    bad("cache_salt", {"cache_salt": "x" * 129}, "cache_salt", "1 to 128 characters"),
    *(bad("cache_salt", {"cache_salt": f"a{char}b"}, "cache_salt", "'@', '/'") for char in "@/\\\0"),
    bad("cache_salt", {"cache_salt": 7}, "cache_salt", "valid string"),
    Case("request_id", "valid", {"request_id": "mine"}, check=id_is("cmpl-mine")),
    Case("request_id", "valid", {"request_id": "mine"}, CHAT, check=id_is("chatcmpl-mine")),
    Case("request_id", "edge", {"request_id": "x" * 256}),
    Case("request_id", "edge", {"request_id": ""}),
    bad("request_id", {"request_id": "x" * 257}, "request_id", "256", "257"),
    bad("request_id", {"request_id": "a\nb"}, "request_id", "printable"),
    bad("request_id", {"request_id": 7}, "request_id", "valid string"),
    Case(IGNORED, "valid", UNKNOWN),
    Case(IGNORED, "edge", dict.fromkeys(UNKNOWN), CHAT),
    Case("vllm_xargs", "valid", {"vllm_xargs": {"a": 1, "b": "x", "c": [1.5, True]}}),
    Case("vllm_xargs", "edge", {"vllm_xargs": {"a": 2**63 - 1, "b": []}}, CHAT),
    Case("vllm_xargs", "edge", {"vllm_xargs": {}}),
    bad("vllm_xargs", {"vllm_xargs": {"a": 2**63}}, "vllm_xargs", "64 bits"),
    bad("vllm_xargs", {"vllm_xargs": {"a": {}}}, "vllm_xargs", "'a'"),
    bad("vllm_xargs", {"vllm_xargs": {"a": [None]}}, "vllm_xargs", "'a'"),
    bad("vllm_xargs", {"vllm_xargs": [1]}, "vllm_xargs", "object"),
    Case(BEAMS, "valid", {"use_beam_search": False, "length_penalty": 1.0}),
    Case(BEAMS, "edge", {"use_beam_search": None, "length_penalty": 1}, CHAT),
    Case(
        BEAMS,
        "valid",
        {"use_beam_search": True, "length_penalty": 0.5, "n": 2, "temperature": 0},
        choices=2,
        streams=False,
    ),
    bad(BEAMS, {"use_beam_search": True, "stream": True}, "stream", "cannot be streamed"),
    bad(BEAMS, {"use_beam_search": True, "n": 65}, "n", "at most 64"),
    bad(BEAMS, {"use_beam_search": True, "top_p": 0.5}, "top_p", "cannot be used with use_beam_search"),
    bad(BEAMS, {"use_beam_search": True, "temperature": 0.5}, "temperature", "0 or 1"),
    bad(BEAMS, {"length_penalty": 0.8}, "length_penalty", "beam search"),
    bad(BEAMS, {"length_penalty": "x"}, "length_penalty", "valid number", url=CHAT),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case, client):
    run(case, client)


LATER = {
    "guided_json": {},
    "guided_regex": "a*",
    "guided_choice": ["a"],
    "guided_grammar": "root ::= a",
    "logits_processors": ["a"],
    "kv_transfer_params": {"a": 1},
}
LATER["guided_json"] = {"type": "object"}
CHAT_LATER = {
    "functions": [{"name": "a"}],
    "function_call": "auto",
    "audio": {"voice": "a"},
    "modalities": ["text", "audio"],
    "web_search_options": {"a": 1},
}


@pytest.mark.parametrize("name", [*LATER, *CHAT_LATER])
def test_what_is_built_later_is_refused_by_name_and_let_through_when_it_asks_for_nothing(client, name):
    value = {**LATER, **CHAT_LATER}[name]
    run(bad("", {name: value}, name, f"{name} is not supported yet", url=CHAT), client)
    run(Case("", "valid", {name: None}, CHAT), client)
    if name in LATER:
        run(bad("", {name: value}, name, f"{name} is not supported yet"), client)


def test_the_header_wins_over_the_field(client):
    response = client.post(
        COMPLETIONS, json={"prompt": "a", "max_tokens": 1, "request_id": "field"}, headers={"X-Request-Id": "header"}
    )
    assert response.json()["id"] == "cmpl-header"
    too_long = client.post(COMPLETIONS, json={"prompt": "a"}, headers={"X-Request-Id": "x" * 257})
    assert_error(too_long, 400, "BadRequestError", param="request_id", says=("256", "257"))


async def test_priorities_are_taken_where_requests_are_scheduled_by_them():
    async with serving(FakeEngine(policy="priority")) as (http, engine):
        for priority in (-(2**31), -1, 5, 2**31 - 1):
            assert (await http.post(COMPLETIONS, json={"prompt": "a", "priority": priority})).status_code == 200
        assert [request.priority for request in engine.seen] == [-(2**31), -1, 5, 2**31 - 1]
        refused = await http.post(COMPLETIONS, json={"prompt": "a", "priority": 2**31})
        assert_error(refused, 400, "BadRequestError", param="priority", says=("32 bits",))


@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
async def test_random_ids_differ(url):
    async with serving() as (http, _):
        body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        ids = {(await http.post(url, json=body)).json()["id"] for _ in range(3)}
    assert len(ids) == 3
