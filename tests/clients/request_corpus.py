"""Request bodies for a comparison of two servers: fields with their edge values, several at a time, and by hand."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Json = Any

COMPLETION: dict[str, Json] = {"prompt": "Once upon a time", "max_tokens": 3, "temperature": 0}
CHAT: dict[str, Json] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0}

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}

SHARED: dict[str, list[Json]] = {
    "model": ["nothing", "", None, 5],
    "temperature": [0.5, 1, 2, -0.1, "1", "x", None, 1e9, True, []],
    "top_p": [0.5, 1, 0, 1.1, -1, None, "x"],
    "top_k": [0, -1, -2, 5, 100000, 1.5, None, "3"],
    "min_p": [0, 0.5, 1, 1.1, -0.1, None],
    "frequency_penalty": [-2, 2, 2.5, -2.5, None, "x"],
    "presence_penalty": [-2, 2, 2.5, None],
    "repetition_penalty": [0.5, 1, 2, 0, -1, None],
    "n": [1, 2, 0, -1, "2", 1.5, None],
    "max_tokens": [1, 0, -1, None, "5", 1.5, 100000],
    "min_tokens": [0, 2, 3, 4, -1, None],
    "seed": [0, 7, -1, 2**63 - 1, 2**63, -(2**63) - 1, None, "x", 1.5],
    "stop": ["a", ["a", "b"], "", [""], [], None, 5, [5], ["a"] * 5],
    "stop_token_ids": [[5], [], None, [-1], [10**9], ["a"], 5],
    "stream": [True, False, "yes", None, 1],
    "stream_options": [None, {}, {"include_usage": True}, {"include_usage": "x"}, 5],
    "logit_bias": [{}, {"5": 1}, {"5": -100}, {"a": 1}, {"999999": 1}, {"5": 200}, {"-1": 1}, None, []],
    "ignore_eos": [True, False, "x", None],
    "skip_special_tokens": [True, False],
    "spaces_between_special_tokens": [True, False],
    "include_stop_str_in_output": [True, False],
    "truncate_prompt_tokens": [1, 3, 0, -1, -2, 100000, None, "x"],
    "prompt_logprobs": [0, 1, -1, -2, 100000, None],
    "allowed_token_ids": [[5], [5, 6], [], [-1], [10**9], None],
    "bad_words": [["a"], [], [""], None, "a"],
    "return_token_ids": [True, False, None],
    "return_tokens_as_token_ids": [True, False],
    "priority": [0, 1, "x"],
    "user": ["me", None, 5],
    "metadata": [{"a": "b"}, None],
    "response_format": [
        None, {"type": "text"}, {"type": "json_object"}, {"type": "x"}, {}, 5, {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}},
    ],
    "structured_outputs": [
        None, {}, {"choice": ["a", "b"]}, {"choice": []}, {"regex": "a+"}, {"regex": "("},
        {"json": {"type": "integer"}}, {"choice": ["a"], "regex": "a"}, 5,
    ],
    "vllm_xargs": [None, {"a": 1}, {"a": "b"}, 5],
    "cache_salt": ["abc", "", None, 5],
    "request_id": ["abc", 5],
    "kv_transfer_params": [None],
    "mm_processor_kwargs": [None],
    "unknown_field": [5, None, {"a": [1]}],
}  # fmt: skip
OF_COMPLETIONS: dict[str, list[Json]] = {
    "prompt": [
        "", [], "a", ["a"], ["a", "b"], [5, 6], [[5], [6, 7]], [""], ["a", ""], [[]], None, 5, {"a": 1}, [5, "a"],
        ["a", 5], [10**9], [-1], [[10**9]], [1.5], True, "a" * 100_000, list(range(600)), "\x00", "naïve 中文",
    ],
    "suffix": ["a", "", None],
    "echo": [True, False, None, "x"],
    "logprobs": [0, 1, 5, -1, -2, 100000, None, "x"],
    "best_of": [1, 2, 0, None],
    "add_special_tokens": [True, False],
    "prompt_embeds": [None],
}  # fmt: skip
_USER = {"role": "user", "content": "Hi"}
_CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
OF_CHATS: dict[str, list[Json]] = {
    "messages": [
        [], None, "x", [5], [{}], [{"role": "user"}], [{"content": "Hi"}], [{"role": "user", "content": None}],
        [{"role": "user", "content": ""}], [{"role": "user", "content": []}], [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], [{"role": "user", "content": ["Hi"]}],
        [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"type": "nothing"}]}],
        [{"role": "user", "content": [{"type": "thinking", "thinking": "hm"}]}],
        [{"role": "system", "content": "Be kind."}, _USER], [{"role": "developer", "content": "Be kind."}, _USER],
        [{"role": "narrator", "content": "Hi"}], [{"role": "", "content": "Hi"}], [{"role": 5, "content": "Hi"}],
        [{"role": "assistant", "content": "Hi"}], [_USER, {"role": "assistant", "content": "Hello"}, _USER],
        [_USER, {"role": "assistant", "tool_calls": [_CALL]}, {"role": "tool", "tool_call_id": "a", "content": "18"}],
        [_USER, {"role": "assistant", "content": None, "tool_calls": []}, _USER],
        [_USER, {"role": "tool", "content": "18"}], [{**_USER, "name": "me"}], [{**_USER, "extra": 5}],
    ],
    "max_completion_tokens": [1, 3, 0, -1, None, "x"],
    "logprobs": [True, False, None, "x", 3],
    "top_logprobs": [0, 2, -1, 100000, None],
    "add_generation_prompt": [True, False],
    "continue_final_message": [False],
    "echo": [True, False],
    "tools": [None, [], [WEATHER], [{}], [{"type": "function"}], 5],
    "tool_choice": ["none", "auto", "required", "x", None, {"type": "function", "function": {"name": "weather"}}],
    "parallel_tool_calls": [True, False, None],
    "chat_template": [None],
    "chat_template_kwargs": [None, {}, {"a": 1}, {"add_generation_prompt": False}, 5],
    "documents": [None, [{"title": "a", "text": "b"}]],
    "reasoning_effort": [None, "low", "medium", "high", "extreme", 5],
    "include_reasoning": [True, False],
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One request.

    Attributes:
        path: Of the endpoint.
        body: Of the request: what is sent as JSON, or bytes as they are.
        name: What is particular about it.
        method: Of the request.
    """

    path: str
    body: Json
    name: str
    method: str = "POST"


def faces() -> list[tuple[str, dict[str, Json], dict[str, list[Json]]]]:
    """Path, least body, and fields with their edge values."""
    return [
        ("/v1/completions", COMPLETION, {**SHARED, **OF_COMPLETIONS}),
        ("/v1/chat/completions", CHAT, {**SHARED, **OF_CHATS}),
    ]


def single_fields() -> Iterator[Case]:
    """Each field with each of its values."""
    for path, base, fields in faces():
        yield Case(path, base, "base")
        for field, values in fields.items():
            for value in values:
                yield Case(path, {**base, field: value}, f"{field}={short(value)}")
        for field in base:
            yield Case(path, {name: value for name, value in base.items() if name != field}, f"without {field}")


def pairs(seed: int, count: int) -> Iterator[Case]:
    """Two to four fields at a time, drawn from a seed."""
    rng = random.Random(seed)
    for _ in range(count):
        path, base, fields = rng.choice(faces())
        chosen = {field: rng.choice(fields[field]) for field in rng.sample(sorted(fields), rng.randint(2, 4))}
        yield Case(path, {**base, **chosen}, ", ".join(f"{field}={short(value)}" for field, value in chosen.items()))


def by_hand() -> Iterator[Case]:
    """Bodies that are not JSON objects, and paths besides the two."""
    for path, base, _ in faces():
        for name, body in [
            ("empty", b""), ("blank", b"  \n"), ("no JSON", b"{"), ("a list", b"[]"), ("a number", b"5"),
            ("null", b"null"), ("not UTF-8", b"\xff\xfe{}"), ("nothing in it", b"{}"),
        ]:  # fmt: skip
            yield Case(path, body, name)
        yield Case(path, {**base, "stream": True, "stream_options": {"include_usage": True}}, "a stream with usage")
        yield Case(path, {**base, "stream": True, "n": 2}, "a stream of two")
        yield Case(path, {**base, "stream": True, "return_token_ids": True}, "a stream with token ids")
        yield Case(path, None, "GET", "GET")
        yield Case(path + "/", base, "a slash behind the path")
    yield Case("/v1/completions", {**COMPLETION, "stream": True, "logprobs": 2}, "a stream with log-probabilities")
    yield Case("/v1/completions", {**COMPLETION, "echo": True, "logprobs": 1, "max_tokens": 1}, "scored")
    chat_logprobs = {**CHAT, "stream": True, "logprobs": True, "top_logprobs": 2}
    yield Case("/v1/chat/completions", chat_logprobs, "a stream with log-probabilities")
    yield Case("/v1/models", None, "models", "GET")
    yield Case("/health", None, "health", "GET")
    yield Case("/version", None, "version", "GET")
    yield Case("/nothing", None, "no such path", "GET")
    yield Case("/tokenize", {"prompt": "Once"}, "tokenize")
    yield Case("/tokenize", {"messages": [_USER]}, "tokenize a chat")
    yield Case("/tokenize", {}, "tokenize nothing")
    yield Case("/tokenize", {"prompt": "Once", "return_token_strs": True}, "tokenize with texts")
    yield Case("/detokenize", {"tokens": [5, 6]}, "detokenize")
    yield Case("/detokenize", {"tokens": [-1]}, "detokenize no token")
    yield Case("/detokenize", {"tokens": "x"}, "detokenize no list")


def corpus(seed: int, num_pairs: int) -> list[Case]:
    """All of them."""
    return [*by_hand(), *single_fields(), *pairs(seed, num_pairs)]


def short(value: Json) -> str:
    """A value for people."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
