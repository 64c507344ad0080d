"""OpenAI's ``prediction`` over HTTP: the same answer, and what usage says of the drafts that it gave."""

import json

import httpx
import openai
import pytest
from server_process import REAL, ServerProcess

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "A fox?"}]
# Other answers give no drafts: the counts leave out those that they gave.
DRAFTS = json.dumps(
    {
        "method": "suffix",
        "num_speculative_tokens": 8,
        "adaptive": False,
        "suffix_decoding_max_cached_requests": 0,
    }
)


@pytest.fixture(scope="module")
def server():
    """The embedded model, whose drafts run wherever some are found."""
    with ServerProcess([*REAL, "--port", "0", "--batch-invariant", "--speculative-config", DRAFTS]) as process:
        process.wait_until_ready()
        yield process


def asked(server, status=200, **fields):
    body = {"messages": MESSAGES, "max_tokens": 60, "temperature": 0, "ignore_eos": True, **fields}
    headers = {"content-type": "application/json"}
    response = httpx.post(server.url + CHAT, content=json.dumps(body), headers=headers, timeout=60)
    assert response.status_code == status, response.text
    return response.json()


def content(text):
    return {"type": "content", "content": text}


@pytest.fixture(scope="module")
def answer(server):
    whole = asked(server)
    assert whole["usage"]["completion_tokens_details"] is None, "nothing was predicted"
    return whole["choices"][0]["message"]["content"]


@pytest.mark.parametrize("in_parts", [False, True], ids=["text", "parts"])
def test_a_right_prediction_is_accepted(server, answer, in_parts):
    middle = len(answer) // 2
    parts = [{"type": "text", "text": answer[:middle]}, {"type": "text", "text": answer[middle:]}]
    whole = asked(server, prediction=content(parts if in_parts else answer))
    assert whole["choices"][0]["message"]["content"] == answer
    details = whole["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] >= 35
    assert details["rejected_prediction_tokens"] <= 24


def test_an_edited_prediction_is_accepted_in_part_streamed_by_a_client(server, answer):
    words = answer.split(" ")
    edited = " ".join([*words[:8], "elephant", *words[9:]])
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=MESSAGES,
        max_tokens=60,
        temperature=0,
        extra_body={"ignore_eos": True},
        prediction=content(edited),
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == answer
    details = chunks[-1].usage.completion_tokens_details
    assert details.accepted_prediction_tokens >= 25
    assert details.rejected_prediction_tokens > 0


def test_an_answer_that_a_stop_string_ends_has_its_counts(server, answer):
    words = answer.split(" ")
    stop = " " + " ".join(words[20:22])
    assert answer.count(stop) == 1
    whole = asked(server, prediction=content(answer), stop=stop)
    assert whole["choices"][0]["message"]["content"] == answer.partition(stop)[0]
    assert whole["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] >= 8


def test_a_wrong_prediction_changes_nothing(server, answer):
    whole = asked(server, prediction=content("Something else altogether, of which no word will come."))
    assert whole["choices"][0]["message"]["content"] == answer
    details = whole["usage"]["completion_tokens_details"]
    assert set(details) == {"accepted_prediction_tokens", "rejected_prediction_tokens"}
    assert details["accepted_prediction_tokens"] <= 2


@pytest.mark.parametrize("prediction", [None, content(""), content([])], ids=["null", "no text", "no parts"])
def test_a_prediction_of_nothing_is_none(server, answer, prediction):
    assert asked(server, prediction=prediction)["choices"][0]["message"]["content"] == answer


@pytest.mark.parametrize(
    "prediction",
    [
        5,
        "text",
        {},
        {"type": "content"},
        {"type": "content", "content": None},
        {"type": "content", "content": 5},
        {"type": "content", "content": [{"type": "image_url", "image_url": "a"}]},
        {"type": "content", "content": [{"type": "text"}]},
        {"type": "content", "content": [{"type": "text", "text": None}]},
        {"type": "guess", "content": "a"},
        {"type": "content", "content": "a b " * 5000},
    ],
    ids=lambda value: json.dumps(value)[:48],
)
def test_what_is_no_prediction_is_refused_by_name(server, prediction):
    error = asked(server, 400, prediction=prediction)["error"]
    assert error["param"].startswith("prediction"), error
    assert "prediction" in error["message"] or error["param"] != "prediction", error
