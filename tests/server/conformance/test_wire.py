"""Rows of the wire format: errors, ends, shapes and counts, and the endpoints besides the two that generate."""

import math

import pytest
from asgi_client import assert_error, serving, without_nulls
from conformance_case import CHAT, COMPLETIONS, MAX_MODEL_LEN, PROMPT, USER, Case, bad, run
from fake_engine import FakeEngine

from rustvllm import __version__
from rustvllm.exceptions import QueueFullError
from rustvllm.logprobs import Logprob
from rustvllm.server.answers.logprobs import completion_places
from rustvllm.server.schemas import responses

ENDS, USAGE = "finish_reason and stop_reason", "usage"
LONG, OBJECTS = "over-long prompt", "logprobs objects"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 16}


def usage_is(prompt, completion):
    def check(answer):
        assert without_nulls(answer["usage"]) == {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    return check


def is_whole(answer):
    """The shapes of completions: parallel lists, whose texts are at their offsets."""
    [choice] = answer["choices"]
    shown = choice["logprobs"]
    assert set(shown) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    for token, offset in zip(shown["tokens"], shown["text_offset"], strict=True):
        assert choice["text"].startswith(token, offset)


def is_chat(answer):
    [place, *_] = answer["choices"][0]["logprobs"]["content"]
    assert set(place) == {"token", "logprob", "bytes", "top_logprobs"}
    assert set(answer["choices"][0]["logprobs"]) == {"content"}
    assert all(set(top) == {"token", "logprob", "bytes"} for top in place["top_logprobs"])
    assert place["bytes"] == list(place["token"].encode())


CASES = [
    Case(ENDS, "valid", HELLO, CHAT, finish="stop", stop=None),
    Case(ENDS, "valid", {"stop": ",", "temperature": 0}, finish="stop", stop=","),
    Case(ENDS, "valid", {"stop_token_ids": [841], "temperature": 0}, finish="stop", stop=841),
    Case(ENDS, "edge", {"max_tokens": 1}, finish="length", stop=None),
    Case(ENDS, "edge", {"stop_token_ids": [841], "stop": " girl", "temperature": 0}, finish="stop", stop=841),
    Case(USAGE, "valid", {"max_tokens": 5, "ignore_eos": True}, check=usage_is(4, 5)),
    Case(USAGE, "valid", {"n": 3, "max_tokens": 5, "ignore_eos": True}, choices=3, check=usage_is(4, 15)),
    Case(
        USAGE,
        "edge",
        {"prompt": [PROMPT, PROMPT], "n": 2, "max_tokens": 2, "ignore_eos": True},
        choices=4,
        check=usage_is(8, 8),
    ),
    Case(USAGE, "edge", HELLO, CHAT, check=usage_is(4, 8)),
    Case(OBJECTS, "valid", {"logprobs": 2}, check=is_whole),
    Case(OBJECTS, "valid", {"logprobs": True, "top_logprobs": 2}, CHAT, check=is_chat),
    Case(OBJECTS, "edge", {"logprobs": 1, "prompt": "\u00e9\U0001f600", "max_tokens": 8}),
    Case(LONG, "edge", {"prompt": [5] * (MAX_MODEL_LEN - 1), "ignore_eos": True}, finish="length", tokens=1),
    bad(LONG, {"prompt": [5] * MAX_MODEL_LEN}, "input_tokens", "512 tokens", "contains 512 input tokens"),
    bad(LONG, {"prompt": [5] * 700}, "input_tokens", "512 tokens", "contains 700 input tokens"),
    bad(LONG, {"prompt": "a b " * 600}, "input_tokens", "maximum context length is 512", "input tokens"),
    bad(LONG, {"prompt": "x" * 2_000_000}, "input_tokens", "512 tokens", "2000000 characters"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case, client):
    run(case, client)


def test_minus_infinity_is_sent_as_minus_9999():
    """With processed log-probabilities what a rule forbids has none."""
    places = [{1: Logprob(-0.5, 1, "a", b"a"), 2: Logprob(-math.inf, 2, "b", b"b")}]
    shown = completion_places([1], places, [0], 2, as_ids=False)
    assert shown["top_logprobs"] == [{"a": -0.5, "b": -9999.0}]


@pytest.mark.parametrize("url", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    ("content", "content_type", "says"),
    [
        (b"", "application/json", "empty"),
        (b"{", "application/json", "not valid JSON"),
        (b"[]", "application/json", "must be a JSON object"),
        (b'{"prompt": "\\ud800"}', "application/json", "not valid JSON"),
        (b"{}", "text/plain", "Content-Type must be application/json, got 'text/plain'"),
        (b"{}", "application/x-www-form-urlencoded", "application/json"),
    ],
)
def test_a_body_that_cannot_be_read_is_a_400(client, url, content, content_type, says):
    response = client.post(url, content=content, headers={"Content-Type": content_type})
    assert_error(response, 400, "BadRequestError", says=(says,))


@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
def test_a_wrong_field_is_a_400_of_the_same_shape_and_never_a_422(client, url):
    required = {COMPLETIONS: "prompt", CHAT: "messages"}[url]
    assert_error(client.post(url, json={}), 400, "BadRequestError", param=required, says=("required",))
    body = {"prompt": PROMPT, "messages": USER, "max_tokens": {}}
    assert_error(client.post(url, json=body), 400, "BadRequestError", param="max_tokens", says=("integer",))


@pytest.mark.parametrize("name", ["tiny", "alias/tiny", None])
@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
def test_every_name_is_served_and_echoed_as_typed(client, url, name):
    body = {"model": name, "prompt": PROMPT, "messages": USER, "max_tokens": 1}
    assert client.post(url, json=body).json()["model"] == (name or "tiny")


@pytest.mark.parametrize("url", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_another_name_is_a_404(client, url):
    body = {"model": "tiny:lora", "prompt": PROMPT, "messages": USER, "tokens": [1]}
    del body["messages" if url in ("/tokenize", COMPLETIONS) else "prompt"]
    response = client.post(url, json=body)
    assert_error(response, 404, "NotFoundError", param="model", says=("The model `tiny:lora` does not exist.",))


def test_the_list_of_models_has_a_card_for_each_name(client):
    listed = responses.ModelList.model_validate(client.get("/v1/models").json(), strict=True)
    assert [card.id for card in listed.data] == ["tiny", "alias/tiny"]
    assert {(card.root, card.max_model_len, card.parent) for card in listed.data} == {("rustvllm-tiny", 512, None)}
    for card in listed.data:
        assert client.get(f"/v1/models/{card.id}").json() == card.model_dump(exclude_unset=True)
    assert_error(client.get("/v1/models/other"), 404, "NotFoundError", param="model", says=("`other`",))


def test_endpoints_that_are_not_there(client):
    assert_error(client.get("/v1/nothing"), 404, "NotFoundError", says=("GET /v1/nothing",))
    assert_error(client.post("/v2/completions", json={}), 404, "NotFoundError", says=("POST /v2/completions",))
    for method, url, allowed in (("GET", COMPLETIONS, "POST"), ("DELETE", "/v1/models", "GET"), ("PUT", CHAT, "POST")):
        response = client.request(method, url)
        assert_error(response, 405, "MethodNotAllowedError", says=(method, allowed))
        assert allowed in response.headers["allow"]
    for url in ("/v1/moderations", "/pooling"):
        assert_error(client.post(url, json={}), 501, "NotImplementedError", says=(f"POST {url}", "not supported yet"))


def test_tokens_and_back(client):
    answer = client.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
    responses.TokenizeResponse.model_validate(answer, strict=True)
    assert answer["tokens"] == [810, 774, 261, 446]
    assert (answer["count"], answer["max_model_len"], len(answer["token_strs"])) == (4, 512, 4)
    back = client.post("/detokenize", json={"tokens": answer["tokens"]}).json()
    assert responses.DetokenizeResponse.model_validate(back, strict=True).prompt == PROMPT
    chat = client.post("/tokenize", json={"messages": [{"role": "user", "content": "Hello"}]}).json()
    assert chat["tokens"] == [2, 614, 4, 3]
    assert client.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    for body, param, says in (
        ({}, "prompt", "required"),
        ({"prompt": 7}, "prompt", "string"),
        ({"prompt": "a", "messages": USER}, "messages", "both"),
    ):
        assert_error(client.post("/tokenize", json=body), 400, "BadRequestError", param=param, says=(says,))
    for tokens, says in (([2048], "0 to 2047"), ([-1], "0 to 2047"), (["a"], "tokens[0]"), (None, "null")):
        response = client.post("/detokenize", json={"tokens": tokens})
        assert_error(response, 400, "BadRequestError", param="tokens", says=(says,))


def test_probes(client):
    for url in ("/health", "/ping"):
        assert responses.HealthResponse.model_validate(client.get(url).json(), strict=True).status == "ok"
    assert client.get("/version").json() == {"version": __version__}


def test_every_answer_has_the_shape_of_the_document(client):
    """Paths, references and statuses of the document hold together, and no answer is a 422."""
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    num_refs = 0

    def walk(node):
        nonlocal num_refs
        if isinstance(node, dict):
            if "$ref" in node:
                assert node["$ref"].removeprefix("#/components/schemas/") in schemas
                num_refs += 1
            for item in node.values():
                walk(item)
        elif isinstance(node, list):
            for item in node:
                walk(item)

    walk(document)
    assert num_refs > 40
    for path in (COMPLETIONS, CHAT):
        answers = document["paths"][path]["post"]["responses"]
        assert set(answers) == {"200", "400", "401", "404", "413", "415", "500", "503"}
        assert set(answers["200"]["content"]) == {"application/json", "text/event-stream"}
    for item in document["paths"].values():
        for operation in item.values():
            assert "422" not in operation["responses"]
            assert "200" in operation["responses"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
async def test_a_full_queue_is_a_503_that_says_when_to_come_back(url, stream):
    engine = FakeEngine()
    engine.refuse = QueueFullError("7 requests wait already")
    engine.refuse.retry_after = 3
    async with serving(engine) as (http, _):
        response = await http.post(url, json={"prompt": PROMPT, "messages": USER, "stream": stream})
    assert_error(response, 503, "ServiceUnavailableError", says=("7 requests",))
    assert response.headers["retry-after"] == "3"
