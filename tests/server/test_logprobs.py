"""Log-probabilities over HTTP, whole and streamed, of the simulated executor: the sampled token has one half, each
further candidate half as much as the one before it."""

import json
import math

import httpx
import openai
import pytest
from server_process import REAL, ServerProcess

HALF = math.log(0.5)
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


FORMS = {
    "one process": ["--disable-frontend-multiprocessing"],
    "two processes": [],
    "two engines": ["--data-parallel-size", "2"],
}


@pytest.fixture(scope="module", params=FORMS.values(), ids=FORMS)
def server(request):
    with ServerProcess([*REAL, "--executor", "sim", "--port", "0", *request.param]) as process:
        process.wait_until_ready()
        yield process


def post(server, path, **body):
    body = {"max_tokens": 8, "temperature": 1, "seed": 3, **body}
    default = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Once upon a time"}
    body = default | body
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return answer.json()["choices"]
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [choice for line in lines for choice in json.loads(line)["choices"]]


@pytest.mark.parametrize("num_logprobs", [0, 1, 3])
def test_completions(server, num_logprobs):
    [choice] = post(server, COMPLETIONS, logprobs=num_logprobs)
    logprobs = choice["logprobs"]
    assert list(logprobs) == ["text_offset", "token_logprobs", "tokens", "top_logprobs"]
    assert [len(values) for values in logprobs.values()] == [8] * 4
    assert logprobs["token_logprobs"] == pytest.approx([HALF] * 8)
    assert "".join(logprobs["tokens"]).strip() == choice["text"].strip()
    for token, offset, top in zip(logprobs["tokens"], logprobs["text_offset"], logprobs["top_logprobs"], strict=True):
        assert choice["text"][offset:].startswith(token)
        assert list(top.values()) == pytest.approx([HALF * (1 + place) for place in range(max(1, num_logprobs))])
        assert next(iter(top)) == token


@pytest.mark.parametrize("num_top", [0, 2])
def test_chat(server, num_top):
    [choice] = post(server, CHAT, logprobs=True, top_logprobs=num_top)
    assert list(choice["logprobs"]) == ["content"]
    content = choice["logprobs"]["content"]
    assert len(content) == 8
    raw = b"".join(bytes(entry["bytes"]) for entry in content)
    assert raw.decode().strip() == choice["message"]["content"].strip()
    for entry in content:
        assert list(entry) == ["token", "logprob", "bytes", "top_logprobs"]
        assert entry["logprob"] == pytest.approx(HALF)
        assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx(
            [HALF * (1 + place) for place in range(num_top)]
        )
        assert all(bytes(top["bytes"]).decode() == top["token"] for top in entry["top_logprobs"])


@pytest.mark.parametrize(
    ("path", "asked"), [(COMPLETIONS, {"logprobs": 2}), (CHAT, {"logprobs": True, "top_logprobs": 2})]
)
@pytest.mark.parametrize("extra", [{}, {"stop": [" and"]}, {"n": 3}, {"stream_options": {"include_usage": True}}])
def test_a_stream_has_the_same_as_the_whole(server, path, asked, extra):
    whole = post(server, path, **asked, **{name: value for name, value in extra.items() if name != "stream_options"})
    gathered = {}
    for choice in post(server, path, stream=True, **asked, **extra):
        so_far = gathered.setdefault(choice["index"], {})
        for name, values in (choice["logprobs"] or {}).items():
            so_far[name] = so_far.get(name, []) + values
    assert [gathered[index] for index in sorted(gathered)] == [choice["logprobs"] for choice in whole]


def test_ids_for_tokens(server):
    [choice] = post(server, COMPLETIONS, logprobs=1, return_tokens_as_token_ids=True)
    assert all(token.startswith("token_id:") for token in choice["logprobs"]["tokens"])
    assert [[token] for token in choice["logprobs"]["tokens"]] == [
        list(top) for top in choice["logprobs"]["top_logprobs"]
    ]


@pytest.mark.parametrize("logprobs", [None, False])
def test_no_answer_has_them_unasked(server, logprobs):
    assert post(server, COMPLETIONS, logprobs=logprobs)[0]["logprobs"] is None
    assert post(server, CHAT, logprobs=logprobs, top_logprobs=0)[0]["logprobs"] is None


def test_the_sdk_reads_them(server):
    messages = [{"role": "user", "content": "Hi"}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        model = client.models.list().data[0].id
        chat = client.chat.completions.create(
            model=model, messages=messages, logprobs=True, top_logprobs=2, max_tokens=3
        )
        done = client.completions.create(model=model, prompt="Hi", logprobs=2, max_tokens=3)
    assert [len(entry.top_logprobs) for entry in chat.choices[0].logprobs.content] == [2, 2, 2]
    assert len(done.choices[0].logprobs.token_logprobs) == 3


PROMPT = "Once upon a time there was a café"


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_echo_shows_the_prompt_first(server, max_tokens):
    """What a harness that scores texts reads: the prompt's own tokens, the first without a value."""
    [choice] = post(server, COMPLETIONS, prompt=PROMPT, echo=True, logprobs=2, max_tokens=max_tokens)
    [alone] = post(server, COMPLETIONS, prompt=PROMPT, logprobs=2, max_tokens=max(max_tokens, 1))
    logprobs = choice["logprobs"]
    assert choice["text"].startswith(PROMPT)
    assert choice["finish_reason"] == "length"
    num_prompt = len(logprobs["tokens"]) - max_tokens
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    assert logprobs["token_logprobs"][1:] == pytest.approx([HALF] * (num_prompt - 1 + max_tokens))
    assert [len(values) for values in logprobs.values()] == [num_prompt + max_tokens] * 4
    for token, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert next(iter(top)) == token
        assert list(top.values()) == pytest.approx([HALF, 2 * HALF])
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        rest = choice["text"][offset:].lstrip(" ")
        assert rest.startswith(token.lstrip(" ")) or "\ufffd" in token or token == "<s>"
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    if max_tokens:
        assert logprobs["tokens"][num_prompt:] == alone["logprobs"]["tokens"]
        shifted = [len(PROMPT) + offset for offset in alone["logprobs"]["text_offset"]]
        assert logprobs["text_offset"][num_prompt:] == shifted


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"n": 2},
        {"prompt": [[5, 6, 7, 8], [9, 10]]},
        {"logprobs": 0},
        {"prompt": [[1, 2], [3]]},  # special tokens, which the text leaves out
    ],
)
def test_a_streamed_echo_has_the_same_as_the_whole(server, extra):
    body = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 3} | extra
    whole = post(server, COMPLETIONS, **body)
    texts, gathered = {}, {}
    for choice in post(server, COMPLETIONS, stream=True, **body):
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        so_far = gathered.setdefault(choice["index"], {})
        for name, values in (choice["logprobs"] or {}).items():
            so_far[name] = so_far.get(name, []) + values
    assert [texts[index] for index in sorted(texts)] == [choice["text"] for choice in whole]
    assert [gathered[index] for index in sorted(gathered)] == [choice["logprobs"] for choice in whole]


def test_an_echo_shows_the_special_tokens_of_a_prompt_where_they_are_not_to_be_left_out(server):
    ids = {"prompt": [1, 5, 2], "echo": True, "logprobs": 0, "max_tokens": 0}
    [choice] = post(server, COMPLETIONS, **ids, skip_special_tokens=False)
    tokens, [hidden] = choice["logprobs"]["tokens"], post(server, COMPLETIONS, **ids)
    assert choice["text"] == "".join(tokens)
    assert choice["logprobs"]["text_offset"] == [0, len(tokens[0]), len(tokens[0] + tokens[1])]
    assert (hidden["text"], hidden["logprobs"]["text_offset"]) == (tokens[1], [0, 0, len(tokens[1])])


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_that_a_request_names(server, stream):
    """In their order behind the sampled one, each half as likely as the one before it."""
    named = {"logprob_token_ids": [7, 5, 7], "return_tokens_as_token_ids": True, "stream": stream}
    shown = {"token_id:7": 2 * HALF, "token_id:5": 3 * HALF}
    places = []
    for choice in post(server, COMPLETIONS, logprobs=0, **named):
        logprobs = choice["logprobs"] or {"tokens": [], "top_logprobs": []}
        places += zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
    assert len(places) == 8
    for token, top in places:
        assert list(top.items()) == [(name, pytest.approx(value)) for name, value in ({token: HALF} | shown).items()]
    places = [
        place
        for choice in post(server, CHAT, logprobs=True, top_logprobs=1, **named)
        for place in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert len(places) == 8
    for place in places:
        top = {entry["token"]: entry["logprob"] for entry in place["top_logprobs"]}
        assert top == pytest.approx({place["token"]: HALF} | shown)
        assert next(iter(top)) == place["token"]


def test_prompt_logprobs(server):
    ids = [5, 6, 7, 8]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        model = client.models.list().data[0].id
        done = client.completions.create(model=model, prompt=ids, max_tokens=1, extra_body={"prompt_logprobs": 1})
        messages = [{"role": "user", "content": "Hi"}]
        chat = client.chat.completions.create(
            model=model, messages=messages, max_tokens=1, extra_body={"prompt_logprobs": 0}
        )
        scored = client.completions.create(model=model, prompt=ids, echo=True, logprobs=0, max_tokens=0)
        for wrong, message in (
            ({"prompt_logprobs": 21}, "prompt_logprobs is 21, but the limit is 20"),
            ({"prompt_logprobs": -1}, "prompt_logprobs is -1"),
            ({"prompt_logprobs": -2}, "at least -1"),
            ({"prompt_logprobs": 0, "stream": True}, "cannot be used with stream=true"),
        ):
            with pytest.raises(openai.BadRequestError, match=message) as refused:
                client.completions.create(model=model, prompt=ids, max_tokens=1, extra_body=wrong)
            assert refused.value.param == "prompt_logprobs"
    first, *places = done.choices[0].prompt_logprobs
    assert first is None
    assert [next(iter(place)) for place in places] == ["6", "7", "8"]
    for place in places:
        own, *others = place.values()
        assert own["logprob"] == pytest.approx(HALF)
        assert (own["rank"], set(own)) == (1, {"logprob", "rank", "decoded_token"})
        assert len(others) == 0
    assert chat.prompt_logprobs[0] is None
    assert chat.usage.prompt_tokens == len(chat.prompt_logprobs)
    assert scored.usage.completion_tokens == 0
    assert scored.choices[0].logprobs.token_logprobs == [None, *[pytest.approx(HALF)] * 3]


def test_ids_for_the_tokens_of_a_prompt(server):
    [choice] = post(
        server, COMPLETIONS, prompt=[5, 6, 7], echo=True, logprobs=1, max_tokens=0, return_tokens_as_token_ids=True
    )
    assert choice["logprobs"]["tokens"] == ["token_id:5", "token_id:6", "token_id:7"]
    assert [list(top) for top in choice["logprobs"]["top_logprobs"][1:]] == [["token_id:6"], ["token_id:7"]]
