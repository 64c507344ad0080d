"""A streamed answer is the answer: the same text, end, tokens and counts as without ``stream``, over HTTP.

The model is simulated, so an answer can be had again. It says plain words, or bytes of a vocabulary that has nothing
else: halves of characters, whole ones, and what is none. Stop strings are taken out of answers, cut anywhere, so that
they begin and end inside tokens; others never come.
"""

import asyncio
import itertools
import json
import os
import random
import sys
from collections.abc import AsyncIterator

import httpx
import pytest
from server_process import ServerProcess

SERVE = [sys.executable, "-m", "rustvllm.cli.main", "serve", "--executor", "sim", "--port", "0"]
MODES = {"process": [], "thread": ["--disable-frontend-multiprocessing"]}
CLIENTS = 8
SECONDS = 60
MANY = int(os.environ.get("RUSTVLLM_TEST_STREAMED_PROMPTS", "300"))
"""Of the long run."""


def write_model(folder, vocabulary, decoder):
    """A model's folder without weights, whose tokens are these and an EOS."""
    size = len(vocabulary) + 1
    vocab = {token: index for index, token in enumerate(vocabulary)}
    eos = {"id": size - 1, "content": "<eos>", "special": True, "single_word": False, "lstrip": False, "rstrip": False}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [eos | {"normalized": False}],
        "normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": decoder,
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": False},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<eos>", "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"})
    )
    config = {"architectures": ["GPT2LMHeadModel"], "vocab_size": size, "n_embd": 4, "n_layer": 1, "n_head": 1}
    (folder / "config.json").write_text(json.dumps(config | {"n_positions": 256, "eos_token_id": size - 1}))
    return folder


def byte_level(folder):
    """Bytes beyond ASCII, as GPT-2 spells them, and some two at a time: most are half a character."""
    printable = {byte: chr(byte) for byte in (*range(161, 173), *range(174, 256))}
    others = [byte for byte in range(256) if not (33 <= byte < 127 or byte in printable)]
    spelled = printable | {byte: chr(256 + place) for place, byte in enumerate(others)}
    beyond = [spelled[byte] for byte in range(128, 256)]
    return write_model(
        folder,
        beyond + [a + b for a, b in zip(beyond, beyond[7:], strict=False)],
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    )


def byte_fallback(folder):
    """Tokens of one byte, of which a run is valid as a whole or not at all, and whole characters between."""
    decoders = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}]
    decoders += [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    parts = [*"漢é😀▁", "▁é", "e\u0301"] + [f"<0x{byte:02X}>" for byte in (*b"\xf0\x9f\x98\x80\xc3\xa9\xff", 65)]
    return write_model(folder, parts, {"type": "Sequence", "decoders": decoders})


SERVERS = [("process", None), ("thread", None), ("process", byte_level), ("process", byte_fallback)]


@pytest.fixture(scope="module", params=SERVERS, ids=lambda of: f"{of[0]}-{of[1].__name__ if of[1] else 'words'}")
def server(request, tmp_path_factory):
    mode, make_model = request.param
    command = [*SERVE, "--sim-eos-after", "60", *MODES[mode]]
    if make_model is not None:
        command += ["--model", str(make_model(tmp_path_factory.mktemp("model")))]
    with ServerProcess(command) as process:
        process.wait_until_ready()
        yield process


async def whole(client: httpx.AsyncClient, path: str, body: dict) -> tuple[list[dict], dict]:
    """Choices and usage of an answer in one piece."""
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return [
        choice_of(choice, choice.get("text", choice.get("message", {}).get("content"))) for choice in found["choices"]
    ], {name: count for name, count in found["usage"].items() if count is not None}  # events leave out what is null


async def streamed(client: httpx.AsyncClient, path: str, body: dict) -> tuple[list[dict], dict]:
    """The answer, put together from the events of a stream."""
    texts = [""] * body["n"]
    ends: dict[int, dict] = {}
    usage = None
    async with client.stream(
        "POST", path, json=body | {"stream": True, "stream_options": {"include_usage": True}}
    ) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for chunk in events(answer):
            assert "error" not in chunk, chunk
            assert usage is None, "usage comes last"
            usage = chunk["usage"]
            for choice in chunk["choices"]:
                index = choice["index"]
                assert index not in ends, "nothing comes after the end of a choice"
                texts[index] += choice.get("text") or choice.get("delta", {}).get("content") or ""
                if choice["finish_reason"]:
                    ends[index] = choice
    return [choice_of(ends[index], text) for index, text in enumerate(texts)], usage


def choice_of(choice: dict, text: str) -> dict:
    """What both ways must have in common."""
    return {
        "index": choice["index"],
        "text": text,
        "finish_reason": choice["finish_reason"],
        "stop_reason": choice["stop_reason"],
    }


async def events(answer: httpx.Response) -> AsyncIterator[dict]:
    """Chunks up to the end that every stream must have."""
    # Only "\n\n" ends an event; httpx would end lines at U+0085 and U+2028 too, which JSON leaves as they are.
    *parts, rest = (await answer.aread()).split(b"\n\n")
    assert (parts.pop(), rest) == (b"data: [DONE]", b"")
    for part in parts:
        if part.startswith(b":"):
            continue  # a comment, for a stream that was silent for long
        assert part.startswith(b"data: ")
        yield json.loads(part.removeprefix(b"data: "))


def random_body(seed: int) -> dict:
    """A body at random, without stop strings."""
    source = random.Random(seed)
    body = {
        "max_tokens": source.randint(1, 70),
        "n": (num_choices := source.choice([1, 1, 2, 3])),
        "temperature": 1 if num_choices > 1 else source.choice([0, 1]),
        "seed": seed,
        "min_tokens": source.choice([0, 0, 5]),
        "ignore_eos": source.random() < 0.3,
        "stream_interval": source.choice([None, None, 1, 2, 5, 40]),
    }
    body["min_tokens"] = min(body["min_tokens"], body["max_tokens"])
    return body


def stop_strings(source: random.Random, texts: list[str]) -> list[str]:
    """One to four: pieces of the answers, their beginnings with another end, and what never comes."""
    found = []
    for _ in range(source.randint(1, 4)):
        text = source.choice(texts)
        start = source.randrange(max(1, len(text)))
        piece = text[start : start + source.choice([1, 2, 3, 7, 20])]
        found.append(source.choice([piece, piece, piece + "\x00", "never there"]) or "never there")
    return found


def cut(text: str, stop: list[str], *, include: bool) -> tuple[str, str | None]:
    """The naive rule: the stop string that ends first, and of these the first in the list."""
    ends = [(text.find(one) + len(one), place) for place, one in enumerate(stop) if one in text]
    if not ends:
        return text, None
    end, place = min(ends)
    return text[: end if include else end - len(stop[place])], stop[place]


async def check(client: httpx.AsyncClient, number: int, completed: list[int]) -> None:
    """One prompt: without stop strings and with them, in one piece and as a stream."""
    source = random.Random(number)
    body = random_body(number)
    if number % 4 == 0:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": f"é漢 {number}"}]
    else:
        path = "/v1/completions"
        body["prompt"] = [source.randrange(13) for _ in range(source.randint(1, 40))]  # every vocabulary has so many
    plain = await whole(client, path, body)
    assert await streamed(client, path, body) == plain, body
    texts = [choice["text"] for choice in plain[0]]
    body |= {"stop": stop_strings(source, texts), "include_stop_str_in_output": source.random() < 0.3}
    stopped = await whole(client, path, body)
    assert await streamed(client, path, body) == stopped, body
    if body["min_tokens"] == 0:  # what else counts is when a stop string comes, and that needs the tokens
        for choice, text in zip(stopped[0], texts, strict=True):
            expected, reason = cut(text, body["stop"], include=body["include_stop_str_in_output"])
            assert choice["text"] == expected, body
            if reason is not None:
                assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason), body
    completed.append(number)


async def check_all(url: str, count: int) -> None:
    numbers = itertools.count()
    completed: list[int] = []

    async def worker(client: httpx.AsyncClient) -> None:
        while (number := next(numbers)) < count:
            await check(client, number, completed)

    async with httpx.AsyncClient(base_url=url, timeout=SECONDS) as client, asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(worker(client))
    assert sorted(completed) == list(range(count))


@pytest.mark.parametrize("count", [60, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_streamed_answers_equal_whole_ones(server, count):
    asyncio.run(check_all(server.url, count))
    load = httpx.get(f"{server.url}/load").json()
    assert load["num_running"] == load["num_waiting"] == load["kv_cache_usage"] == 0
