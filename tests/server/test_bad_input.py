"""Bad requests over a fake engine: one clear 400 (or 404, 405, 413, 501), and the next good request is served."""

import json

import httpx
import pytest
from asgi_client import assert_error, serving, without_nulls
from fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st

from rustvllm.engine import input_processor
from rustvllm.server.endpoint_table import UNBUILT_ENDPOINTS
from rustvllm.server.error_bodies import is_of_anthropic
from rustvllm.server.state import ServedModel, ServerSettings

URL = "/v1/completions"
GOOD = {"prompt": "good", "max_tokens": 2}
BEAMS = {**GOOD, "n": 2, "use_beam_search": True}


async def post_raw(client, content, url=URL, content_type="application/json"):
    headers = {} if content_type is None else {"Content-Type": content_type}
    return await client.post(url, content=content, headers=headers)


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "prompt", "required"),
        ({"prompt": None}, "prompt", "null"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": ["a", ""]}, "prompt", "empty"),
        ({"prompt": {}}, "prompt", "an object"),
        ({"prompt": 7}, "prompt", "a number"),
        ({"prompt": [1.5]}, "prompt", "a number"),
        ({"prompt": [True]}, "prompt", "a boolean"),
        ({"prompt": [[1, "a"]]}, "prompt", "a string"),
        ({"prompt": ["a", [1]]}, "prompt", "mix"),
        ({"prompt": [1, 258]}, "prompt", "258"),
        ({"prompt": [1, -1]}, "prompt", "-1"),
        ({"prompt": [[1], [2, 10**30]]}, "prompt", "vocabulary"),
        ({"prompt": "x" * 300}, "input_tokens", "256 tokens"),
        ({"prompt": [1] * 256}, "input_tokens", "contains 256 input tokens"),
        ({"prompt": "x" * 2_000_000}, "input_tokens", "256 tokens"),
        ({**GOOD, "max_tokens": 0}, "max_tokens", "echo"),
        ({**GOOD, "max_tokens": -3}, "max_tokens", "-3"),
        ({**GOOD, "max_tokens": -3, "echo": True}, "max_tokens", "-3"),
        ({**GOOD, "max_tokens": 10**12}, "max_tokens", "256"),
        ({**GOOD, "max_tokens": "many"}, "max_tokens", "'many'"),
        ({**GOOD, "max_tokens": 1.5}, "max_tokens", "1.5"),
        ({**GOOD, "temperature": -0.1}, "temperature", "-0.1"),
        ({**GOOD, "temperature": 2.1}, "temperature", "2.1"),
        ({**GOOD, "temperature": "hot"}, "temperature", "'hot'"),
        ({**GOOD, "top_p": 0}, "top_p", "0"),
        ({**GOOD, "top_p": 1.1}, "top_p", "1.1"),
        ({**GOOD, "top_k": -2}, "top_k", "-2"),
        ({**GOOD, "min_p": 2}, "min_p", "2"),
        ({**GOOD, "n": 0}, "n", "0"),
        ({**GOOD, "n": 20000}, "n", "16384"),
        ({**GOOD, "n": 2, "temperature": 0}, "n", "greedy"),
        ({"prompt": ["a"] * 9000, "n": 2}, "n", "18000"),
        ({"prompt": [[1]] * 20_000}, "prompt", "20000"),
        ({**GOOD, "seed": 2**64}, "seed", "9223372036854775807"),
        ({**GOOD, "min_tokens": 3}, "min_tokens", "3"),
        ({**GOOD, "stop": ""}, "stop", "empty"),
        ({**GOOD, "stop": ["a", ""]}, "stop", "empty"),
        ({**GOOD, "stop": [1]}, "stop", "stop[0]: input should be a valid string, got 1"),
        ({**GOOD, "stop": 1}, "stop", "stop: input should be a valid string or a valid array, got 1"),
        ({**GOOD, "stop_token_ids": [258]}, "stop_token_ids", "258"),
        ({**GOOD, "stop_token_ids": ["a"] * 1000}, "stop_token_ids", "stop_token_ids[0]"),
        ({**GOOD, "stop_token_ids": ["a"] * 100_000}, "stop_token_ids", "100000 entries; the limit is 1024"),
        ({**GOOD, "truncate_prompt_tokens": 257}, "truncate_prompt_tokens", "257"),
        ({**GOOD, "truncation_side": "middle"}, "truncation_side", "'left' or 'right'"),
        ({**GOOD, "stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
        ({**GOOD, "stream": True, "stream_options": 1}, "stream_options", "stream_options"),
        ({**GOOD, "logprobs": 21}, "logprobs", "logprobs is 21, but the limit is 20"),
        ({**GOOD, "logprobs": -1}, "logprobs", "logprobs is -1 (the vocabulary of"),
        ({**GOOD, "logprobs": -2}, "logprobs", "at least -1"),
        ({**GOOD, "logprobs": "many"}, "logprobs", "valid integer"),
        ({**GOOD, "logprobs": 21, "echo": True}, "logprobs", "logprobs is 21, but the limit is 20"),
        ({**GOOD, "prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "cannot be used with stream=true"),
        ({**GOOD, "request_id": "a\nb"}, "request_id", "256 printable characters, got 'a\\nb'"),
        ({**GOOD, "request_id": "a" * 257}, "request_id", "256 printable characters, got 257 characters"),
        ({**GOOD, "suffix": "!"}, "suffix", "not supported yet"),
        ({**GOOD, "use_beam_search": True, "stream": True}, "stream", "use_beam_search cannot be streamed"),
        ({**GOOD, "use_beam_search": True, "stop": "x"}, "stop", "cannot be used with use_beam_search"),
        ({**BEAMS, "max_tokens": 0, "echo": True}, "max_tokens", "at least 1 with use_beam_search, got 0"),
        ({**BEAMS, "echo": True, "logprobs": 0}, "logprobs", "logprobs with echo cannot be used with use_beam_search"),
        (
            {**BEAMS, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "structured_outputs cannot be used with",
        ),
        (
            {**BEAMS, "response_format": {"type": "json_object"}},
            "response_format",
            "response_format cannot be used with",
        ),
        ({**GOOD, "best_of": 0}, "best_of", "at least 1"),
        ({**GOOD, "length_penalty": 0.5}, "length_penalty", "set use_beam_search"),
        ({**GOOD, "presence_penalty": 2.5}, "presence_penalty", "2.5"),
        ({**GOOD, "repetition_penalty": 0}, "repetition_penalty", "0"),
        ({**GOOD, "logit_bias": {"x": 5}}, "logit_bias", "'x'"),
        ({**GOOD, "logit_bias": {"1": None}}, "logit_bias", "number"),
        ({**GOOD, "guided_regex": "a*"}, "guided_regex", "not supported yet"),
        ({**GOOD, "structured_outputs": {"json": 3}}, "structured_outputs", "a schema (an object or a boolean)"),
        ({**GOOD, "prompt_embeds": "AAAA"}, "prompt_embeds", "not supported yet"),
        ({**GOOD, "response_format": {"type": "json_schema"}}, "response_format", "needs a json_schema"),
    ],
)
async def test_bad_fields_name_the_parameter_and_the_value(body, param, says):
    async with serving() as (client, _):
        for stream in ({}, {"stream": True}) if "stream" not in body and "stream_options" not in body else ({},):
            response = await client.post(URL, json={**body, **stream})
            assert_error(response, 400, "BadRequestError", param=param, says=(says,))
            assert len(response.content) < 2000
        assert (await client.post(URL, json=GOOD)).status_code == 200


async def test_too_many_values_of_a_prompt_are_refused_by_what_was_sent(monkeypatch):
    monkeypatch.setattr(input_processor, "MAX_PROMPT_LOGPROBS", 20)
    many = {"prompt": "abcd", "max_tokens": 1}
    async with serving() as (client, _):
        for fields, param, says in (
            ({"prompt_logprobs": 9}, "prompt_logprobs", "prompt_logprobs of 5 tokens with 9 candidates"),
            ({"prompt_logprobs": 9, "echo": True, "logprobs": 1}, "prompt_logprobs", "prompt_logprobs of 5 tokens"),
            ({"echo": True, "logprobs": 9}, "logprobs", "echo and logprobs=9 ask for prompt_logprobs of 5 tokens"),
            ({"echo": True, "logprobs": 9, "prompt_logprobs": 1}, "logprobs", "at most 3 candidates"),
        ):
            answer = await client.post(URL, json=many | fields)
            assert_error(answer, 400, "BadRequestError", param=param, says=(says,))
        assert (await client.post(URL, json=many | {"prompt_logprobs": 3})).status_code == 200


async def test_an_adapter_that_is_unloaded_while_a_request_is_read_is_no_model_any_more(monkeypatch):
    lists = []
    monkeypatch.setattr(ServedModel, "adapters", property(lambda _: lists.pop() if lists else {}))
    async with serving() as (client, engine):
        for stream in (False, True):
            lists.append({"polite": None})
            answer = await client.post(URL, json={**GOOD, "model": "polite", "stream": stream})
            assert_error(answer, 404, "NotFoundError", param="model", says=("`polite` does not exist",))
        assert not engine.seen


async def test_max_tokens_0_with_echo_scores_the_prompt():
    async with serving() as (client, _):
        body = (await client.post(URL, json={"prompt": "abc", "max_tokens": 0, "echo": True})).json()
    assert body["choices"][0]["text"] == "abc"
    assert without_nulls(body["usage"]) == {"prompt_tokens": 4, "completion_tokens": 0, "total_tokens": 4}


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_numbers_that_json_has_not_are_refused(number):
    async with serving() as (client, _):
        response = await post_raw(client, f'{{"prompt": "a", "temperature": {number}}}')
        assert response.status_code == 400
        assert (await client.post(URL, json=GOOD)).status_code == 200


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"  \n ", "empty"),
        (b"not json", "not valid JSON"),
        (b'{"prompt": "a"', "not valid JSON"),
        (b'{"prompt": "a"} x', "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b"[]", "object"),
        (b"null", "object"),
        (b'"text"', "object"),
        (b"7", "object"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not valid JSON"),
    ],
)
@pytest.mark.parametrize("url", [URL, "/v1/chat/completions"])
async def test_bodies_that_are_no_json_object(content, says, url):
    async with serving() as (client, _):
        assert_error(await post_raw(client, content, url), 400, "BadRequestError", says=(says,))
        assert (await client.post(URL, json=GOOD)).status_code == 200


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
async def test_another_content_type_is_refused(content_type):
    async with serving() as (client, _):
        response = await post_raw(client, json.dumps(GOOD), content_type=content_type)
        assert_error(response, 400, "BadRequestError", says=("application/json",))
        for fine in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"):
            assert (await post_raw(client, json.dumps(GOOD), content_type=fine)).status_code == 200


async def test_a_body_over_the_limit_is_413_with_and_without_a_length():
    async def chunks():
        for _ in range(20):
            yield b" " * 1000

    async with serving(settings=ServerSettings(max_body_bytes=10_000)) as (client, _):
        for content in (b" " * 10_001, chunks()):
            response = await post_raw(client, content)
            assert_error(response, 413, "BadRequestError", says=("10000", "--max-body-bytes"))
        assert (await client.post(URL, json=GOOD)).status_code == 200


async def test_paths_and_methods():
    async with serving() as (client, _):
        assert_error(await client.get("/v1/nothing"), 404, "NotFoundError", says=("GET /v1/nothing",))
        assert_error(await client.post("/v1/completions/x"), 404, "NotFoundError")
        wrong_method = await client.get(URL)
        assert_error(wrong_method, 405, "MethodNotAllowedError", says=("POST",))
        assert wrong_method.headers["allow"] == "POST"
        unknown = await client.get("/v1/models/other/name")
        assert_error(unknown, 404, "NotFoundError", param="model", says=("`other/name`",))


async def test_endpoints_of_later_say_so_by_name():
    assert len(UNBUILT_ENDPOINTS) > 20
    async with serving() as (client, _):
        for row in UNBUILT_ENDPOINTS:
            method = row.method
            url = row.path.replace("{rest:path}", "abc/other")
            answer = await client.request(method, url)
            if is_of_anthropic(url):  # in its own shape
                assert answer.status_code == 501
                error = answer.json()["error"]
                assert error["type"] == "api_error"
                assert all(text in error["message"] for text in (f"{method} {url}", "not supported yet"))
            else:
                assert_error(answer, 501, "NotImplementedError", says=(f"{method} {url}", "not supported yet"))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
# fmt: off
FIELDS = [
    "model", "prompt", "messages", "n", "best_of", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
    "repetition_penalty", "seed", "max_tokens", "max_completion_tokens", "min_tokens", "stop", "stop_token_ids",
    "ignore_eos", "logit_bias", "allowed_token_ids", "bad_words", "echo", "stream", "stream_options", "tools",
    "tool_choice", "chat_template_kwargs", "documents", "priority", "cache_salt", "request_id",
    "truncate_prompt_tokens", "truncation_side", "add_special_tokens", "response_format", "logprobs",
    "continue_final_message",
]
# fmt: on
bodies = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(FIELDS, json_values),
).map(lambda fields: {"prompt": "abc", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, **fields})


@given(body=bodies, url=st.sampled_from([URL, "/v1/chat/completions"]))
async def test_random_fields_are_served_or_refused_but_never_break_the_server(body, url):
    async with serving(FakeEngine(length=3, max_model_len=64)) as (client, _):
        response = await post_raw(client, json.dumps(body, ensure_ascii=True), url)
        assert response.status_code in (200, 400, 404), response.text
        if response.status_code != 200:
            error = response.json()["error"]
            assert error["message"]
            assert error["code"] == response.status_code
        assert (await client.post(URL, json=GOOD)).status_code == 200


async def test_errors_of_our_own_making_tell_nothing(monkeypatch):
    async with serving(raise_unforeseen=False) as (client, engine):
        engine.refuse = RuntimeError("/home/user/secret")
        response = await client.post(URL, json=GOOD)
        assert_error(response, 500, "InternalServerError")
        assert "secret" not in response.text
    assert isinstance(response, httpx.Response)
