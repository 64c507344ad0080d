"""``/tokenize`` and ``/detokenize``: the ids that a prompt becomes, and what is refused."""

import json

import httpx
import pytest
from asgi_client import assert_error, serving
from fake_engine import BOS, EOS, VOCAB_SIZE, FakeEngine
from server_process import REAL, ServerProcess

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
USER = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "ab"}, [BOS, 97, 98]),
        ({"prompt": "ab", "add_special_tokens": False}, [97, 98]),
        ({"prompt": "ab", "messages": None}, [BOS, 97, 98]),
        ({"prompt": ""}, [BOS]),
        ({"prompt": "é", "model": "alias/fake", "add_special_tokens": False}, [0xC3, 0xA9]),
        ({"messages": USER}, list(b"<user>Hi")),
        ({"messages": USER, "add_special_tokens": True}, [BOS, *b"<user>Hi"]),
    ],
)
async def test_tokenize(body, tokens):
    async with serving(FakeEngine(chat_template=TEMPLATE)) as (client, _):
        answer = (await client.post("/tokenize", json=body)).json()
    assert answer == {"count": len(tokens), "max_model_len": 256, "tokens": tokens, "token_strs": None}


async def test_the_entries_of_the_vocabulary_are_told_when_asked_for():
    async with serving(FakeEngine()) as (client, _):
        answer = (await client.post("/tokenize", json={"prompt": "ab", "return_token_strs": True})).json()
    assert answer["token_strs"] == ["<s>", "a", "b"]


async def test_a_text_longer_than_the_model_takes_is_counted_all_the_same():
    async with serving(FakeEngine()) as (client, _):
        answer = (await client.post("/tokenize", json={"prompt": "a" * 1000})).json()
    assert answer["count"] == 1001


async def test_detokenize():
    async with serving(FakeEngine()) as (client, _):
        assert (await client.post("/detokenize", json={"tokens": [104, 105]})).json() == {"prompt": "hi"}
        assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("/tokenize", {}, "prompt", ("required",)),
        ("/tokenize", {"prompt": "a", "messages": USER}, "messages", ("both",)),
        ("/tokenize", {"prompt": 7}, "prompt", ("string",)),
        ("/tokenize", {"messages": "Hi"}, "messages", ("array",)),
        ("/tokenize", {"messages": USER, "chat_template": "x"}, "chat_template", ("--trust-request-chat-template",)),
        ("/detokenize", {}, "tokens", ("required",)),
        ("/detokenize", {"tokens": "hi"}, "tokens", ("array",)),
        ("/detokenize", {"tokens": [1.5]}, "tokens", ("integer",)),
        ("/detokenize", {"tokens": [-1]}, "tokens", ("-1", str(VOCAB_SIZE - 1))),
        ("/detokenize", {"tokens": [EOS, VOCAB_SIZE]}, "tokens", (str(VOCAB_SIZE),)),
        ("/detokenize", {"tokens": [10**40]}, "tokens", ("1000",)),
    ],
)
async def test_what_is_refused(path, body, param, says):
    async with serving(FakeEngine(chat_template=TEMPLATE)) as (client, _):
        headers = {"content-type": "application/json"}
        answer = await client.post(path, content=json.dumps(body).encode(), headers=headers)
    assert_error(answer, 400, "BadRequestError", param=param, says=says)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_another_model_is_not_found(path):
    async with serving(FakeEngine()) as (client, _):
        answer = await client.post(path, json={"model": "x", "prompt": "a", "tokens": []})
    assert_error(answer, 404, "NotFoundError", param="model")


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})])
async def test_without_a_tokenizer_both_are_refused(path, body):
    async with serving(FakeEngine(tokenizer=False)) as (client, _):
        assert_error(await client.post(path, json=body), 400, "BadRequestError", says=("skip_tokenizer_init",))


def test_what_the_real_server_says_is_what_it_counts():
    text = "Once upon a time, " * 300
    with ServerProcess([*REAL, "--port", "0"]) as server:
        url = server.wait_until_ready()
        body = httpx.post(f"{url}/tokenize", json={"prompt": text[:900]}).json()
        usage = httpx.post(f"{url}/v1/completions", json={"prompt": text[:900], "max_tokens": 1}).json()["usage"]
        assert body["count"] == len(body["tokens"]) == usage["prompt_tokens"]
        back = httpx.post(f"{url}/detokenize", json={"tokens": body["tokens"]}).json()["prompt"]
        assert back.endswith(text[:900])
        assert httpx.post(f"{url}/tokenize", json={"prompt": text}).json()["count"] > body["count"]
