"""Parameters that are lists over HTTP: through an engine process of their own, and refused where they cannot be."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from asgi_client import assert_error, serving
from fake_engine import FakeEngine
from server_process import REAL, ServerProcess

URL, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "logprobs": 0, "ignore_eos": True}
PROMPT["return_tokens_as_token_ids"] = True


@pytest.fixture(scope="module")
def server():
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    command = [*REAL, "--port", "0", "--max-num-seqs", "4", "--max-model-len", "64", "--logits-processors"]
    with ServerProcess([*command, "processors_for_tests:Aim"], PYTHONPATH=path) as process:
        process.wait_until_ready()
        yield process


def ids(server, **body):
    answer = httpx.post(server.url + URL, json={**PROMPT, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    choices = [choice["logprobs"]["tokens"] for choice in answer.json()["choices"]]
    return [[int(token.removeprefix("token_id:")) for token in tokens] for tokens in choices]


def test_each_parameter_reaches_the_sampler(server):
    [plain] = ids(server)
    assert ids(server, logit_bias={"9": 1000}) == [[9] * 8]
    assert set(ids(server, allowed_token_ids=[20, 30])[0]) <= {20, 30}
    text = httpx.post(server.url + URL, json=PROMPT, timeout=60).json()["choices"][0]["text"]
    word = max(text.split(), key=len)
    answer = httpx.post(server.url + URL, json={**PROMPT, "bad_words": [word]}, timeout=60).json()
    assert word in text
    assert word not in answer["choices"][0]["text"]
    assert ids(server, vllm_xargs={"target": 33}) == [[33] * 8]
    assert ids(server) == [plain]
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}
    answer = httpx.post(server.url + CHAT, json={**body, "logit_bias": {"5": 100}}, timeout=60).json()
    assert answer["choices"][0]["message"]["content"] == "!" * 4


def test_many_at_once_have_each_their_own(server):
    """More than run at a time, with several samples each: rows change hands."""
    bodies = [{"vllm_xargs": {"target": 40 + i}} if i % 2 else {"allowed_token_ids": [60 + i]} for i in range(12)]
    for i, body in enumerate(bodies):
        body.update(n=1 + i % 3, temperature=1.0 if i % 3 else 0, seed=i, max_tokens=3 + i % 4)
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda body: ids(server, **body), bodies))
    for i, answer in enumerate(answers):
        assert answer == [[(40 if i % 2 else 60) + i] * (3 + i % 4)] * (1 + i % 3)


def test_a_class_that_refuses_a_request_says_why(server):
    for changes in ({}, {"stream": True, "logprobs": None}, {"n": 2, "temperature": 1}):
        body = {**PROMPT, "vllm_xargs": {"target": "nowhere"}, **changes}
        answer = httpx.post(server.url + URL, json=body, timeout=60)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["type"] == "BadRequestError"
        assert "Aim: there is no token 'nowhere'" in error["message"]
    assert len(ids(server)[0]) == 8


def test_a_mistake_in_a_class_is_no_fault_of_the_request(server):
    answer = httpx.post(server.url + URL, json={**PROMPT, "vllm_xargs": {"target": "broken"}}, timeout=60)
    assert answer.status_code == 500
    assert "Aim: TypeError: 'NoneType' object is not callable" in answer.json()["error"]["message"]
    assert len(ids(server)[0]) == 8


LARGE = 10**19
GOOD = {"prompt": "good", "max_tokens": 2}


@pytest.mark.parametrize(
    ("wrong", "param", "says"),
    [
        ({"logit_bias": {"258": 1}}, "logit_bias", "0 to 257"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "'-1'"),
        ({"logit_bias": {"1.5": 1}}, "logit_bias", "'1.5'"),
        ({"logit_bias": {"x": 5}}, "logit_bias", "'x'"),
        ({"logit_bias": {"1": "x"}}, "logit_bias", "logit_bias[1] must be a number"),
        ({"logit_bias": {"1": True}}, "logit_bias", "logit_bias[1] must be a number"),
        ({"logit_bias": [1]}, "logit_bias", "object"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "must not be empty"),
        ({"allowed_token_ids": [258]}, "allowed_token_ids", "258, which is not in the vocabulary (0 to 257)"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids", "at least 0, got -1"),
        ({"allowed_token_ids": [LARGE]}, "allowed_token_ids", "at most 2147483647"),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids", "integer"),
        ({"bad_words": [""]}, "bad_words", "empty word"),
        ({"bad_words": ["\t"]}, "bad_words", "only spaces"),
        ({"bad_words": "word"}, "bad_words", "array"),
        ({"bad_words": ["x" * 1025]}, "bad_words", "1025 characters; the limit is 1024"),
        ({"bad_words": ["x" * 200]}, "bad_words", "1 to 128"),
        ({"allowed_token_ids": [97], "bad_words": ["a"]}, "bad_words", "exclude all 1 allowed_token_ids"),
        ({"allowed_token_ids": [257], "min_tokens": 1}, "allowed_token_ids", "min_tokens is 1"),
        ({"vllm_xargs": {"a": None}}, "vllm_xargs", "must be a string"),
        ({"vllm_xargs": {"a": {"b": 1}}}, "vllm_xargs", "must be a string"),
        ({"vllm_xargs": {"a": [1, [2]]}}, "vllm_xargs", "must be a string"),
        ({"vllm_xargs": {"a": LARGE}}, "vllm_xargs", "64 bits"),
        ({"vllm_xargs": [1]}, "vllm_xargs", "object"),
    ],
)
async def test_what_cannot_be_is_a_400_that_names_it(wrong, param, says):
    async with serving(FakeEngine()) as (client, _):
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        for url, body in ((URL, GOOD), (CHAT, chat)):
            response = await client.post(url, json={**body, **wrong})
            assert_error(response, 400, "BadRequestError", param=param, says=(says,))
        assert (await client.post(URL, json=GOOD)).status_code == 200


@pytest.mark.parametrize(
    "right",
    [
        {"logit_bias": None},
        {"logit_bias": {}},
        {"logit_bias": {"0": -1e300, "257": 1000, "5": 0}},
        {"allowed_token_ids": None},
        {"allowed_token_ids": [0, 257, 0]},
        {"bad_words": None},
        {"bad_words": []},
        {"bad_words": ["a", " b", "c d"]},
        {"vllm_xargs": None},
        {"vllm_xargs": {}},
        {"vllm_xargs": {"a": 1, "b": "x", "c": [1.5, "y", True], "d": 2**63 - 1}},
    ],
)
async def test_what_may_be_is_taken(right):
    async with serving(FakeEngine()) as (client, _):
        assert (await client.post(URL, json={**GOOD, **right})).status_code == 200
