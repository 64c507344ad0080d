"""``response_format`` and ``structured_outputs`` over HTTP: an answer is valid, or cut by ``length``."""

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from server_process import REAL, ServerProcess

from rustvllm.config.hub import embedded_model_path

COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["glad", "sad"]}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["mood", "age"],
    "additionalProperties": False,
}
BY_SCHEMA = {"type": "json_schema", "json_schema": {"name": "mouse", "schema": SCHEMA, "strict": True}}
NEGATED = {"properties": {"a": {"not": {}}}}
SEEDS = range(4)
# A text depends on its request alone, to the last bit.
FLAGS = ["--max-num-seqs", "8", "--max-model-len", "256", "--batch-invariant"]
PROMPT = "Once upon a time there was a mouse"


@pytest.fixture(scope="module")
def server():
    with ServerProcess([*REAL, "--port", "0", *FLAGS]) as process:
        process.wait_until_ready()
        yield process


def is_mouse(text):
    value = json.loads(text)
    age = value["age"]
    return list(value) == ["mood", "age"] and value["mood"] in ("glad", "sad") and type(age) is int and 0 <= age <= 120


def is_object(text):
    return isinstance(json.loads(text), dict)


KINDS = {
    "schema": ({"response_format": BY_SCHEMA}, is_mouse),
    "object": ({"response_format": {"type": "json_object"}}, is_object),
    "regex": ({"structured_outputs": {"regex": "[0-9]{3}-[a-c]{1,4}"}}, re.compile("[0-9]{3}-[a-c]{1,4}").fullmatch),
    "choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, ["yes", "no"].__contains__),
}


def body_of(url, seed, **fields):
    asked = {"messages": [{"role": "user", "content": PROMPT}]} if url == CHAT else {"prompt": PROMPT}
    return {**asked, "max_tokens": 200, "seed": seed, **fields}


def answer(server, url, body):
    """Text and end of a whole answer."""
    response = httpx.post(server.url + url, json=body, timeout=60)
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    return choice["message"]["content"] if url == CHAT else choice["text"], choice["finish_reason"]


def streamed(server, url, body):
    """The same of a stream, put together."""
    with httpx.stream("POST", server.url + url, json={**body, "stream": True}, timeout=60) as response:
        assert response.status_code == 200, response.read()
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events.pop() == "[DONE]"
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    texts = [choice["delta"].get("content") or "" if url == CHAT else choice["text"] for choice in choices]
    [end] = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return "".join(texts), end


@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_is_what_was_asked_for_whole_and_streamed(server, kind, url):
    fields, is_valid = KINDS[kind]
    num_valid = 0
    for seed in SEEDS:
        whole = answer(server, url, body_of(url, seed, **fields))
        assert streamed(server, url, body_of(url, seed, **fields)) == whole
        text, end = whole
        if end == "stop":
            assert is_valid(text), text
            num_valid += 1
        else:
            assert end == "length"
    assert num_valid > 0 or kind == "object", "a model may go on with an object for as long as it likes"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": NEGATED, "strict": True},
                }
            },
            "response_format",
        ),
        ({"structured_outputs": {"json": NEGATED, "strict": True}}, "structured_outputs"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_under_its_field(server, url, fields, param, stream):
    response = httpx.post(server.url + url, json=body_of(url, 1, stream=stream, **fields), timeout=60)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith("/properties/a/not is not supported"), error


HOSTILE_NAME = "a\r\nX-Evil: 1\u00e9"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
def test_what_is_left_out_of_a_schema_that_is_not_strict_is_in_a_header(server, url, stream):
    never = {"enum": ["b"], "not": {"const": "a"}}
    schema = {"type": "object", "properties": {HOSTILE_NAME: never}, "required": [HOSTILE_NAME]}
    schema["additionalProperties"] = False
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body = body_of(url, 1, response_format=asked, stream=stream)
    response = httpx.post(server.url + url, json=body, timeout=60)
    assert response.status_code == 200, response.text
    assert response.headers["x-unenforced-schema"] == "/properties/a%0D%0AX-Evil%3A%201%C3%A9/not"
    assert "x-evil" not in response.headers
    if not stream:
        assert json.loads(answer(server, url, body)[0]) == {HOSTILE_NAME: "b"}
    plain = httpx.post(server.url + url, json=body_of(url, 1, stream=stream), timeout=60)
    assert "x-unenforced-schema" not in plain.headers


def test_a_constrained_neighbour_changes_nothing_of_a_free_stream(server):
    free = body_of(COMPLETIONS, 7, ignore_eos=True)
    alone = streamed(server, COMPLETIONS, free)
    assert alone[1] == "length"
    constrained = body_of(COMPLETIONS, 7, **KINDS["regex"][0])
    with ThreadPoolExecutor(6) as pool:
        running = [pool.submit(streamed, server, COMPLETIONS, body) for body in [free, constrained] * 3]
        with_others = [future.result() for future in running]
    assert with_others[::2] == [alone] * 3
    assert all(KINDS["regex"][1](text) and end == "stop" for text, end in with_others[1::2])


def test_a_seed_gives_the_same_text_whichever_of_two_api_processes_is_asked(server):
    bodies = [body_of(COMPLETIONS, seed, **fields) for fields, _ in KINDS.values() for seed in SEEDS]
    alone = [answer(server, COMPLETIONS, body) for body in bodies]
    assert len(set(alone)) > len(KINDS), "seeds give different texts"
    flags = [*FLAGS, "--api-server-count", "2"]
    with ServerProcess([*REAL, "--port", "0", *flags]) as others, ThreadPoolExecutor(len(bodies)) as pool:
        others.wait_until_ready()
        asked = set()
        for _ in range(20):  # each connection finds one of the two: after some rounds both have been asked
            running = [pool.submit(answer, others, COMPLETIONS, body) for body in bodies]
            while not all(future.done() for future in running):
                asked |= {api.pid for api in others.apis() if len(api.net_connections()) > 1}
            assert [future.result() for future in running] == alone
            if len(asked) == 2:
                break
        assert len(asked) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
def test_a_grammar_that_allowed_ids_leave_no_token_is_refused(server, url, stream):
    body = body_of(url, 1, structured_outputs={"choice": ["yes", "no"]}, allowed_token_ids=[5], stream=stream)
    response = httpx.post(server.url + url, json=body, timeout=60)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["message"].startswith("no token may follow: the grammar, allowed_token_ids, bad_words"), error


def test_a_tokenizer_that_has_gone_is_the_servers_fault_and_a_bad_schema_the_clients(tmp_path):
    """It is read again when the first grammar is compiled; what needs none of that is served as ever."""
    folder = tmp_path / "model"
    shutil.copytree(embedded_model_path(), folder)
    user = [{"role": "user", "content": PROMPT}]
    anthropic = {"model": "mouse", "messages": user, "max_tokens": 9}
    by_format = {"format": {"type": "json_schema", "schema": SCHEMA}}
    flags = [str(folder), "--served-model-name", "mouse", *FLAGS]
    with ServerProcess([*REAL, *flags, "--port", "0"]) as server, httpx.Client(timeout=60) as client:
        client.base_url = server.wait_until_ready()
        shutil.rmtree(folder)
        for stream in (False, True):
            for url in (COMPLETIONS, CHAT):
                response = client.post(url, json=body_of(url, 1, response_format=BY_SCHEMA, stream=stream))
                error = response.json()["error"]
                assert (response.status_code, error["code"], error["type"]) == (500, 500, "InternalServerError")
                assert "the server cannot read the tokenizer of its model" in error["message"]
                assert str(folder) not in error["message"]
            response = client.post(MESSAGES, json={**anthropic, "output_config": by_format, "stream": stream})
            assert (response.status_code, response.json()["error"]["type"]) == (500, "api_error"), response.text
        bad = client.post(COMPLETIONS, json=body_of(COMPLETIONS, 1, structured_outputs={"regex": "(a"}))
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "structured_outputs"), bad.text
        schema = {"format": {"type": "json_schema", "schema": {"type": 5}}}
        bad = client.post(MESSAGES, json={**anthropic, "output_config": schema})
        assert (bad.status_code, bad.json()["error"]["type"]) == (400, "invalid_request_error"), bad.text
        assert client.post(COMPLETIONS, json=body_of(COMPLETIONS, 1, max_tokens=2)).status_code == 200
    assert f"the tokenizer of {folder} cannot be read now: " in server.output
