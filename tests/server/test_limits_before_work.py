"""Counts and sizes are checked before work: what a request holds is bounded, and nothing of it holds the event loop."""

import json
import re
import threading

import pytest
from asgi_client import assert_error, serving
from fake_engine import VOCAB_SIZE, FakeEngine, FakeTokenizer
from loop_watch import never_long

from rustvllm.exceptions import InvalidRequestError
from rustvllm.sampling_params import SamplingParams
from rustvllm.server.endpoints import tokenization
from rustvllm.server.errors import BadRequestError
from rustvllm.server.schemas.protocol import CompletionRequest
from rustvllm.server.schemas.request_body import parse_request
from rustvllm.server.state import ServerSettings
from rustvllm.text.body_values import MAX_COUNTED_FIELDS, count_body_values

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
BODY_BYTES = 8 << 20
USER = {"role": "user", "content": "x"}


def filled(item, size=BODY_BYTES - 4096):
    """A list of as many of the item as there is room for in a body."""
    return [item] * (size // (len(json.dumps(item)) + 2))


def numbered(size=BODY_BYTES - 4096):
    return [f"w{number}" for number in range(size // 12)]


CASES = {
    "prompt: a text": (COMPLETIONS, lambda: {"prompt": "a" * 8_000_000}),
    "prompt: texts": (COMPLETIONS, lambda: {"prompt": filled("a" * 500)}),
    "prompt: a text that is cut": (COMPLETIONS, lambda: {"prompt": "a " * 1_000_000, "truncate_prompt_tokens": 9}),
    "prompt: ids": (COMPLETIONS, lambda: {"prompt": filled(200)}),
    "prompt: ids that are cut": (COMPLETIONS, lambda: {"prompt": filled(200), "truncate_prompt_tokens": 9}),
    "prompt: the last id is wrong": (COMPLETIONS, lambda: {"prompt": [*filled(7), -1], "truncate_prompt_tokens": 9}),
    "prompt: lists": (COMPLETIONS, lambda: {"prompt": filled([])}),
    "bad_words": (COMPLETIONS, lambda: {"prompt": "a", "bad_words": numbered()}),
    "bad_words: as many as are taken": (COMPLETIONS, lambda: {"prompt": "a", "bad_words": numbered(49_152)}),
    "stop": (COMPLETIONS, lambda: {"prompt": "a", "stop": numbered()}),
    "stop: a text": (COMPLETIONS, lambda: {"prompt": "a", "stop": "a" * 8_000_000}),
    "stop_token_ids": (COMPLETIONS, lambda: {"prompt": "a", "stop_token_ids": filled(9)}),
    "allowed_token_ids": (COMPLETIONS, lambda: {"prompt": "a", "allowed_token_ids": filled(9)}),
    "logit_bias": (COMPLETIONS, lambda: {"prompt": "a", "logit_bias": dict.fromkeys(numbered(), 1)}),
    "vllm_xargs": (COMPLETIONS, lambda: {"prompt": "a", "vllm_xargs": {"x": filled(1)}}),
    "user": (COMPLETIONS, lambda: {"prompt": "a", "user": "u" * 8_000_000}),
    "model": (COMPLETIONS, lambda: {"prompt": "a", "model": "u" * 8_000_000}),
    "request_id": (COMPLETIONS, lambda: {"prompt": "a", "request_id": "u" * 8_000_000}),
    "cache_salt": (COMPLETIONS, lambda: {"prompt": "a", "cache_salt": "u" * 8_000_000}),
    "an unknown field": (COMPLETIONS, lambda: {"prompt": "a", "metadata": filled([1])}),
    "unknown fields": (COMPLETIONS, lambda: {"prompt": "a", **dict.fromkeys(numbered(), 1)}),
    "messages": (CHAT, lambda: {"messages": filled(USER)}),
    "messages: as many as are taken": (CHAT, lambda: {"messages": [USER] * 8000}),
    "messages: a text": (CHAT, lambda: {"messages": [{"role": "user", "content": "a" * 8_000_000}]}),
    "messages: parts": (CHAT, lambda: {"messages": [{"role": "user", "content": filled({"text": "a"})}]}),
    "messages: another field": (CHAT, lambda: {"messages": [{**USER, "x": filled([])}]}),
    "messages: arguments": (
        CHAT,
        lambda: {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]},
            ]
        },
    ),
    "tools": (CHAT, lambda: {"messages": [USER], "tools": filled({"type": "function"})}),
    "documents": (CHAT, lambda: {"messages": [USER], "documents": filled({"text": "a"})}),
    "chat_template": (CHAT, lambda: {"messages": [USER], "chat_template": "{{ x }}" * 1_000_000}),
    "chat_template: as long as is taken": (CHAT, lambda: {"messages": [USER], "chat_template": "{{ x }}" * 9_000}),
    "chat_template_kwargs": (CHAT, lambda: {"messages": [USER], "chat_template_kwargs": {"x": filled(1)}}),
    "response: items": (RESPONSES, lambda: {"input": filled(USER)}),
    "response: as many items as are taken": (RESPONSES, lambda: {"input": [USER] * 8000}),
    "response: calls": (
        RESPONSES,
        lambda: {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}] * 8000},
    ),
    "response: a text": (RESPONSES, lambda: {"input": "a" * 8_000_000}),
    "response: parts": (
        RESPONSES,
        lambda: {"input": [{"role": "user", "content": filled({"type": "input_text", "text": "a"})}]},
    ),
    "response: another field of an item": (RESPONSES, lambda: {"input": [{**USER, "x": filled([])}]}),
    "response: instructions that are cut": (
        RESPONSES,
        lambda: {"input": "a", "instructions": "a" * 8_000_000, "truncation": "auto", "max_output_tokens": 1},
    ),
    "response: tools": (RESPONSES, lambda: {"input": "a", "tools": filled({"type": "function", "name": "f"})}),
    "response: a tool of many values": (
        RESPONSES,
        lambda: {
            "input": "a",
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object", "x": [1] * 60_000}}],
            "max_output_tokens": 1,
        },
    ),
    "response: a schema of many values": (
        RESPONSES,
        lambda: {
            "input": "a",
            "text": {"format": {"type": "json_schema", "name": "f", "schema": {"default": [1] * 60_000}}},
            "max_output_tokens": 1,
        },
    ),
    "response: the same, streamed": (
        RESPONSES,
        lambda: {
            "input": "a",
            "stream": True,
            "text": {"format": {"type": "json_schema", "name": "f", "schema": {"default": [1] * 60_000}}},
            "max_output_tokens": 1,
        },
    ),
    "response: metadata": (RESPONSES, lambda: {"input": "a", "metadata": dict.fromkeys(numbered(5_000_000), "a")}),
    "response: include": (RESPONSES, lambda: {"input": "a", "include": filled("message.output_text.logprobs")}),
    "tokenize: a text": ("/tokenize", lambda: {"prompt": "a" * 8_000_000, "return_token_strs": True}),
    "tokenize: as long as is taken": ("/tokenize", lambda: {"prompt": "a" * 1_000_000, "return_token_strs": True}),
    "tokenize: messages": ("/tokenize", lambda: {"messages": filled(USER)}),
    "detokenize": ("/detokenize", lambda: {"tokens": filled(97)}),
    "detokenize: as many as are taken": ("/detokenize", lambda: {"tokens": [97] * 262_144}),
}


@pytest.mark.parametrize("case", CASES)
async def test_no_field_at_the_limit_of_the_body_holds_the_event_loop(case):
    path, make = CASES[case]
    body = json.dumps(make(), separators=(",", ":")).encode()
    assert len(body) < BODY_BYTES
    settings = ServerSettings(trust_request_chat_template=True)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    engine = FakeEngine(chat_template=template if path in (CHAT, RESPONSES) else None)
    async with serving(engine, settings) as (client, _):
        assert (await client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1})).status_code == 200
        headers = {"Content-Type": "application/json"}
        answer = await never_long(lambda: client.post(path, content=body, headers=headers), name=case)
        assert answer.status_code in (200, 400, 404), answer.text[:300]
        assert answer.status_code == 200 or len(answer.content) < 2000


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"bad_words": [f"w{i}" for i in range(4097)]}, "bad_words", ("4097", "4096")),
        ({"stop": [f"w{i}" for i in range(1025)]}, "stop", ("1025", "1024")),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids", ("1025", "1024")),
        ({"allowed_token_ids": [1] * (VOCAB_SIZE + 1)}, "allowed_token_ids", (str(VOCAB_SIZE + 1), str(VOCAB_SIZE))),
        ({"logit_bias": {str(i): 1 for i in range(VOCAB_SIZE + 1)}}, "logit_bias", (str(VOCAB_SIZE + 1),)),
        ({"metadata": [[i] for i in range(40_000)]}, "metadata", ("65536", "metadata")),
        ({"prompt": [1] * 4097 + [-1]}, "prompt", ("-1", "4097")),
    ],
)
async def test_what_is_too_much_is_refused_with_its_count_and_the_limit(fields, param, says):
    async with serving() as (client, engine):
        answer = await client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1, **fields})
        assert_error(answer, 400, "BadRequestError", param=param, says=says)
        assert engine.seen == []


async def test_an_answer_does_not_repeat_a_prompt_without_end():
    async with serving(FakeEngine(max_model_len=4096)) as (client, engine):
        for name in ("echo", "return_token_ids"):
            body = {"prompt": "p" * 4000, "n": 5000, name: True, "max_tokens": 1}
            assert_error(
                await client.post(COMPLETIONS, json=body),
                400,
                "BadRequestError",
                param=name,
                says=("20000000", "4194304"),
            )
        assert engine.seen == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 20}, "prompt_logprobs"),
        ({"prompt_logprobs": 20, "stream": False, "echo": True, "logprobs": 1}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 20, "prompt_logprobs": 1}, "logprobs"),
        ({"echo": True, "logprobs": 20, "stream": True}, "logprobs"),
    ],
)
async def test_an_answer_does_not_repeat_log_probabilities_of_a_prompt_without_end(fields, param):
    async with serving(FakeEngine(max_model_len=4096)) as (client, engine):
        for many in ({"prompt": "p" * 4000, "n": 1000}, {"prompt": ["p" * 4000] * 1000}):
            answer = await client.post(COMPLETIONS, json={"max_tokens": 1, **many, **fields})
            says = ("84000000", "16777216")
            assert_error(answer, 400, "BadRequestError", param=param, says=says)
        assert engine.seen == []
        few = {"prompt": "p" * 4000, "n": 100, "max_tokens": 1, "prompt_logprobs": 20}
        assert (await client.post(COMPLETIONS, json=few)).status_code == 200


async def test_a_body_of_brackets_is_refused_before_anything_is_made_of_it():
    async with serving() as (client, _):
        body = {"prompt": "a", "x": [[]] * 200_000}
        assert_error(await client.post(COMPLETIONS, json=body), 400, "BadRequestError", says=("200002", "131072"))
        brackets_in_texts = {"prompt": "a", "user": '[{"\\' * 200_000, "max_tokens": 1}
        assert (await client.post(COMPLETIONS, json=brackets_in_texts)).status_code == 200


def test_as_many_fields_are_counted_one_by_one_as_the_core_says():
    body = json.dumps({f"f{number}": [number] for number in range(300)}).encode()
    fields = count_body_values(body)
    assert len(fields) == MAX_COUNTED_FIELDS
    assert sum(field.num_values for field in fields) == 600


class Unparsed(CompletionRequest):
    """A request whose body must not be parsed."""

    @classmethod
    def model_validate_json(cls, *_, **__):
        raise AssertionError("it was parsed")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt": "a", "stop": ["s"] * 1_000_000}, "stop has 1000000 entries; the limit is 1024"),
        ({"prompt": "a", "bad_words": numbered()}, "the limit is 4096"),
        ({"prompt": filled(200)}, "prompt has 1676902 entries; the limit is 1048576"),
        ({"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(600_000)), 1)}, "the limit is 524288"),
        ({"prompt": "a", "logit_bias": {"1": [{}] * 80_000}}, "more than 65536 values in logit_bias"),
        ({"prompt": "a", "messages": [USER] * 100_000}, "more than 65536 values in messages"),
        ({"prompt": "a", "messages": [[1, 2]] * 60_000}, "more than 65536 values in messages"),
        ({"prompt": [{}] * 70_000}, "more than 65536 values in prompt"),
        ({**dict.fromkeys(numbered(2_000_000), 1), "prompt": "a"}, "more than 65536 values in its fields, which"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_are_counted_before_any_is_made(body, says):
    with pytest.raises((InvalidRequestError, BadRequestError), match=re.escape(says)):
        parse_request(json.dumps(body).encode(), Unparsed)


class CountingTokenizer(FakeTokenizer):
    """Counts the texts that it was given."""

    num_texts = 0

    def encode(self, text, add_special_tokens=True):
        self.num_texts += 1
        return super().encode(text, add_special_tokens)


async def test_bad_words_are_counted_before_one_of_them_is_tokenised_and_tokenised_once_for_all_prompts():
    engine = FakeEngine()
    engine.tokenizer = engine.input_processor._tokenizer = CountingTokenizer()
    async with serving(engine) as (client, _):
        body = {"prompt": ["a"] * 20, "max_tokens": 1, "bad_words": [f"w{i}" for i in range(100)]}
        assert (await client.post(COMPLETIONS, json=body)).status_code == 200
        assert engine.tokenizer.num_texts == 20 + 2 * 100
        assert len(engine.seen) == 20
        assert all(len(request.sampling_extras["bad_words"]) == 200 for request in engine.seen)
        body["bad_words"] *= 50
        assert (await client.post(COMPLETIONS, json=body)).status_code == 400
        assert engine.tokenizer.num_texts == 20 + 2 * 100
    engine.seen.clear()
    assert len(engine.input_processor._checked) == 0, "what was made of parameters ends with them"


@pytest.mark.parametrize("name", ["bad_words", "stop", "stop_token_ids", "allowed_token_ids"])
def test_offline_parameters_have_the_same_limits(name):
    entry = "x" if name in ("bad_words", "stop") else 1
    with pytest.raises(InvalidRequestError, match=f"{name} has 600000 entries"):
        SamplingParams(**{name: [entry] * 600_000})


def test_many_ids_are_an_array_and_few_a_list():
    few, many = (
        parse_request(json.dumps({"prompt": [5] * n}).encode(), CompletionRequest).prompt[0] for n in (9, 9000)
    )
    assert isinstance(few, list)
    assert not isinstance(many, list)
    assert list(many) == [5] * 9000


async def test_tokens_are_told_up_to_a_limit():
    async with serving() as (client, _):
        too_long = await client.post("/tokenize", json={"prompt": "a" * 1_048_577})
        assert_error(too_long, 400, "BadRequestError", param="prompt", says=("1048577", "1048576"))
        too_wide = await client.post("/tokenize", json={"prompt": "é" * 600_000})
        assert_error(too_wide, 400, "BadRequestError", param="prompt", says=("1200000",))
        longest = await client.post("/tokenize", json={"prompt": "ab" * 50_000, "return_token_strs": True})
        body = longest.json()
        assert body["count"] == len(body["tokens"]) == len(body["token_strs"]) == 100_001
        assert body["tokens"][1:] == [97, 98] * 50_000
        assert body["token_strs"][1:] == ["a", "b"] * 50_000
        assert_error(
            await client.post("/detokenize", json={"tokens": [97] * 262_145}),
            400,
            "BadRequestError",
            param="tokens",
            says=("262145", "262144"),
        )
        whole = await client.post("/detokenize", json={"tokens": [97] * 262_144})
        assert whole.json() == {"prompt": "a" * 262_144}


async def test_memory_is_given_back_after_many_tokens(monkeypatch):
    calls = []
    monkeypatch.setattr(tokenization, "give_back_memory", lambda: calls.append(threading.current_thread()))
    async with serving() as (client, _):
        assert (await client.post("/tokenize", json={"prompt": "a"})).status_code == 200
        assert calls == []
        assert (await client.post("/tokenize", json={"prompt": "a" * 5000})).status_code == 200
        assert len(calls) == 1
        assert calls[0] is not threading.main_thread()
