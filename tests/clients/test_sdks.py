"""litellm and langchain-openai against the real server: what they hand to their callers is what the server said."""

import httpx
import pytest
from embedded_server import MODEL

PROMPT = "Once upon a time"
ASKED = {"model": MODEL, "temperature": 0, "max_tokens": 12}
ROUNDING = 1e-5
"""Log-probabilities travel as JSON numbers; nothing but their printing may differ."""

pytestmark = pytest.mark.timeout(300)  # a program may be slow to start where others run


def post(url, path, **asked):
    response = httpx.post(f"{url}/v1/{path}", json={**ASKED, **asked}, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def usage_of(whole, prefix="prompt", output="completion"):
    usage = whole["usage"]
    return {
        f"{prefix}_tokens": usage["prompt_tokens"],
        f"{output}_tokens": usage["completion_tokens"],
        "total_tokens": usage["total_tokens"],
    }


@pytest.fixture(scope="module")
def chat(server):
    """The plain answer to the conversation that every program sends."""
    return post(server.url, "chat/completions", messages=[{"role": "user", "content": PROMPT}])


@pytest.fixture(scope="module")
def chat_logprobs(server):
    messages = [{"role": "user", "content": PROMPT}]
    asked = {"messages": messages, "logprobs": True, "top_logprobs": 2}
    return post(server.url, "chat/completions", **asked)["choices"][0]["logprobs"]["content"]


@pytest.fixture(scope="module")
def completion(server):
    return post(server.url, "completions", prompt=PROMPT)


@pytest.fixture(scope="module")
def litellm_answers(answers_of):
    return answers_of("litellm_calls.py")


@pytest.fixture(scope="module")
def langchain_answers(answers_of):
    return answers_of("langchain_calls.py")


def assert_same_logprobs(found, expected):
    assert len(found) == len(expected) == ASKED["max_tokens"]
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours["token"], ours["bytes"]) == (theirs["token"], theirs["bytes"])
        assert ours["logprob"] == pytest.approx(theirs["logprob"], abs=ROUNDING)
        assert [top["token"] for top in ours["top_logprobs"]] == [top["token"] for top in theirs["top_logprobs"]]


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm_chats(litellm_answers, chat, chat_logprobs, provider):
    found = litellm_answers[provider]
    choice = chat["choices"][0]
    expected = {
        "text": choice["message"]["content"],
        "role": "assistant",
        "finish_reason": choice["finish_reason"],
        "usage": usage_of(chat),
    }
    assert found["completion"] == found["acompletion"] == expected
    assert found["eight_at_once"] == [expected] * 8
    assert found["stream"] == {
        "text": expected["text"],
        "finish_reasons": [expected["finish_reason"]],
        "usages": [expected["usage"]],
    }
    assert found["acompletion_stream"] == {**found["stream"], "usages": []}
    assert found["extra_body"]["usage"]["prompt_tokens"] == 2
    assert_same_logprobs(found["logprobs"]["content"], chat_logprobs)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm_raises_its_own_errors(litellm_answers, provider):
    found = litellm_answers[provider]
    assert (found["unknown_model"]["type"], found["unknown_model"]["status"]) == ("NotFoundError", 404)
    assert "The model `nothing` does not exist." in found["unknown_model"]["message"]
    assert (found["bad_temperature"]["type"], found["bad_temperature"]["status"]) == ("BadRequestError", 400)
    assert "temperature must be in [0, 2], got 9.0" in found["bad_temperature"]["message"]


def test_litellm_completes_text(litellm_answers, completion):
    text = completion["choices"][0]["text"]
    assert litellm_answers["text"] == {
        "text": text,
        "finish_reason": completion["choices"][0]["finish_reason"],
        "usage": usage_of(completion),
        "streamed": text,
    }


def test_langchain_chats(langchain_answers, chat, chat_logprobs):
    found = langchain_answers
    choice = chat["choices"][0]
    text = choice["message"]["content"]
    expected = {"text": text, "finish_reason": choice["finish_reason"], "usage": usage_of(chat, "input", "output")}
    assert found["invoke"] == found["ainvoke"] == expected
    assert found["abatch"] == [expected] * 4
    assert found["batch"][0] == found["batch"][2] == expected
    assert found["batch"][1]["text"] != text
    for stream in (found["stream"], found["astream"]):
        assert stream.pop("num_chunks") > 3
        assert stream == expected
    assert found["conversation"]["usage"]["input_tokens"] > expected["usage"]["input_tokens"]
    assert_same_logprobs(found["logprobs"]["content"], chat_logprobs)
    # bind(stop) cuts before the word.
    assert found["stop"]["finish_reason"] == "stop"
    assert found["stop"]["text"] == text[: text.index(text.split()[-1])]


def test_langchain_completes_text(langchain_answers, completion):
    text = completion["choices"][0]["text"]
    found = langchain_answers
    assert found["completions"] == found["completions_stream"] == found["completions_ainvoke"] == text
    assert found["completions_batch"] == [text, text]
    assert found["completions_generate"] == {name: 2 * number for name, number in usage_of(completion).items()}


def test_langchain_raises_the_sdks_errors(langchain_answers):
    error = langchain_answers["unknown_model"]
    assert error["status"] == 404
    assert "NotFound" in error["type"]
    assert "The model `nothing` does not exist." in error["message"]
