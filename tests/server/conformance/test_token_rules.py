"""Rows of the table of parameters: log-probabilities, which tokens may be sampled, and the echo of a prompt."""

import math

import pytest
from conformance_case import CHAT, COMPLETIONS, PROMPT, VOCAB_SIZE, Case, bad, run

WHOLE, CHATS, OF_PROMPT, ECHO = (
    "logprobs (completions)",
    "logprobs/top_logprobs (chat)",
    "prompt_logprobs",
    "echo (completions)",
)
NUM_PROMPT_TOKENS = 4


def places(number):
    """Each token has so many candidates, its own among them or in addition."""

    def check(answer):
        for choice in answer["choices"]:
            shown = choice["logprobs"]
            assert len({len(values) for values in shown.values()}) == 1
            for token, own, top in zip(shown["tokens"], shown["token_logprobs"], shown["top_logprobs"], strict=True):
                assert number <= len(top) <= number + 1
                assert top[token] == own <= 0
            assert "".join(shown["tokens"]).startswith(choice["text"])

    return check


def chat_places(number):
    def check(answer):
        content = answer["choices"][0]["logprobs"]["content"]
        assert len(content) == answer["usage"]["completion_tokens"]
        for place in content:
            assert len(place["top_logprobs"]) == number
            assert bytes(place["bytes"]).decode(errors="replace") == place["token"]
            values = [candidate["logprob"] for candidate in place["top_logprobs"]]
            assert values == sorted(values, reverse=True)

    return check


def prompt_places(number):
    def check(answer):
        shown = answer["prompt_logprobs"] if "prompt_logprobs" in answer else answer["choices"][0]["prompt_logprobs"]
        assert shown[0] is None
        assert len(shown) == answer["usage"]["prompt_tokens"]
        assert all(number <= len(place) <= number + 1 for place in shown[1:] if number)
        assert all(len(place) == 1 for place in shown[1:] if not number)

    return check


def only_ids(*allowed):
    def check(answer):
        assert set(answer["choices"][0]["token_ids"]) <= set(allowed)

    return check


def no_logprobs(answer):
    assert answer["choices"][0]["logprobs"] is None


def echoed_places(answer):
    [choice] = answer["choices"]
    shown = choice["logprobs"]
    assert choice["text"].startswith(PROMPT)
    assert shown["token_logprobs"][0] is None
    assert shown["top_logprobs"][0] is None
    assert None not in shown["token_logprobs"][1:]
    assert len(shown["tokens"]) == NUM_PROMPT_TOKENS + answer["usage"]["completion_tokens"]
    assert shown["text_offset"][0] == 0
    assert shown["text_offset"] == sorted(shown["text_offset"])
    assert choice["text"][shown["text_offset"][NUM_PROMPT_TOKENS] :].startswith(shown["tokens"][NUM_PROMPT_TOKENS])


def empty_is_null(answer):
    assert answer["choices"][0]["text"] == PROMPT
    assert answer["choices"][0]["logprobs"]["token_logprobs"][0] is None


CASES = [
    Case(WHOLE, "valid", {"logprobs": 3}, check=places(3)),
    Case(WHOLE, "valid", {"logprobs": 2, "n": 2, "prompt": ["One", "Two"]}, choices=4, check=places(2)),
    Case(WHOLE, "edge", {"logprobs": 0}, check=places(0)),
    Case(WHOLE, "edge", {"logprobs": 20}, check=places(20)),
    Case(WHOLE, "edge", {"logprobs": None}, check=no_logprobs),
    Case(WHOLE, "edge", {"logprobs": False}, check=no_logprobs),
    bad(WHOLE, {"logprobs": 21}, "logprobs", "logprobs is 21", "the limit is 20"),
    bad(WHOLE, {"logprobs": -1}, "logprobs", "-1 (the vocabulary of 2048 tokens)", "the limit is 20"),
    bad(WHOLE, {"logprobs": -2}, "logprobs", "at least -1, got -2"),
    bad(WHOLE, {"logprobs": "all"}, "logprobs", "valid integer"),
    Case(CHATS, "valid", {"logprobs": True, "top_logprobs": 3}, CHAT, check=chat_places(3)),
    Case(CHATS, "edge", {"logprobs": True}, CHAT, check=chat_places(0)),
    Case(CHATS, "edge", {"logprobs": True, "top_logprobs": 20}, CHAT, check=chat_places(20)),
    Case(CHATS, "edge", {"logprobs": False, "top_logprobs": 0}, CHAT, check=no_logprobs),
    bad(CHATS, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "21", "20", url=CHAT),
    bad(CHATS, {"top_logprobs": 2}, "top_logprobs", "logprobs=true", url=CHAT),
    bad(CHATS, {"logprobs": True, "top_logprobs": -2}, "top_logprobs", "-2", url=CHAT),
    bad(CHATS, {"logprobs": 7}, "logprobs", "valid boolean", url=CHAT),
    Case(OF_PROMPT, "valid", {"prompt_logprobs": 2}, check=prompt_places(2), streams=False),
    Case(OF_PROMPT, "valid", {"prompt_logprobs": 1}, CHAT, check=prompt_places(1), streams=False),
    Case(OF_PROMPT, "edge", {"prompt_logprobs": 0}, check=prompt_places(0), streams=False),
    Case(OF_PROMPT, "edge", {"prompt_logprobs": None}),
    bad(OF_PROMPT, {"prompt_logprobs": 21}, "prompt_logprobs", "21", "20", streams=False),
    bad(OF_PROMPT, {"prompt_logprobs": -1}, "prompt_logprobs", "-1", "20", streams=False),
    bad(OF_PROMPT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "cannot be used with stream=true"),
    bad(OF_PROMPT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream=true", url=CHAT),
    Case("logprob_token_ids", "edge", {"logprob_token_ids": None}),
    Case("logprob_token_ids", "edge", {"logprob_token_ids": []}, CHAT),
    Case("logprob_token_ids", "valid", {"logprob_token_ids": [1], "logprobs": 0}),
    Case("logprob_token_ids", "valid", {"logprob_token_ids": [1, 300], "logprobs": True}, CHAT),
    Case("logprob_token_ids", "edge", {"logprob_token_ids": [511] * 128, "logprobs": 3}),
    bad("logprob_token_ids", {"logprob_token_ids": [1]}, "logprob_token_ids", "needs logprobs"),
    bad("logprob_token_ids", {"logprob_token_ids": [1]}, "logprob_token_ids", "needs logprobs", url=CHAT),
    bad("logprob_token_ids", {"logprob_token_ids": [1] * 129, "logprobs": 1}, "logprob_token_ids", "129", "128"),
    bad("logprob_token_ids", {"logprob_token_ids": [10**6], "logprobs": 1}, "logprob_token_ids", "0 to"),
    bad("logprob_token_ids", {"logprob_token_ids": [-1], "logprobs": 1}, "logprob_token_ids", "-1"),
    bad("logprob_token_ids", {"logprob_token_ids": [1.5], "logprobs": 1}, "logprob_token_ids", "logprob_token_ids[0]"),
    bad("logprob_token_ids", {"logprob_token_ids": [None], "logprobs": 1}, "logprob_token_ids", "logprob_token_ids[0]"),
    bad("logprob_token_ids", {"logprob_token_ids": [[1]], "logprobs": 1}, "logprob_token_ids", "logprob_token_ids[0]"),
    bad("logprob_token_ids", {"logprob_token_ids": [2**40], "logprobs": 1}, "logprob_token_ids", str(2**40)),
    bad("logprob_token_ids", {"logprob_token_ids": 1, "logprobs": 1}, "logprob_token_ids", "array"),
    bad(
        "logprob_token_ids",
        {"logprob_token_ids": [1], "logprobs": 0, "use_beam_search": True, "temperature": 0},
        "logprob_token_ids",
        "use_beam_search",
    ),
    Case("logit_bias", "valid", {"logit_bias": {"841": 100}, "return_token_ids": True}, check=only_ids(841)),
    Case("logit_bias", "edge", {"logit_bias": {"841": 1e9}, "return_token_ids": True}, check=only_ids(841)),
    Case("logit_bias", "edge", {"logit_bias": {"0": -1e9, str(VOCAB_SIZE - 1): 0}}, CHAT),
    Case("logit_bias", "edge", {"logit_bias": {}}),
    Case("logit_bias", "edge", {"logit_bias": {str(token_id): 1 for token_id in range(VOCAB_SIZE)}}),
    bad("logit_bias", {"logit_bias": {str(i): 1 for i in range(VOCAB_SIZE + 1)}}, "logit_bias", "2049", "2048"),
    bad("logit_bias", {"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias", "'2048'", "0 to 2047"),
    bad("logit_bias", {"logit_bias": {"-1": 1}}, "logit_bias", "'-1'", "0 to 2047"),
    bad("logit_bias", {"logit_bias": {"girl": 1}}, "logit_bias", "'girl'", "0 to 2047", url=CHAT),
    bad("logit_bias", {"logit_bias": {"1": "much"}}, "logit_bias", "number"),
    bad("logit_bias", {"logit_bias": [1]}, "logit_bias", "logit_bias"),
    Case(
        "allowed_token_ids",
        "valid",
        {"allowed_token_ids": [16, 841], "return_token_ids": True},
        check=only_ids(16, 841),
    ),
    Case(
        "allowed_token_ids",
        "edge",
        {"allowed_token_ids": [VOCAB_SIZE - 1], "return_token_ids": True},
        check=only_ids(2047),
    ),
    Case("allowed_token_ids", "edge", {"allowed_token_ids": None}, CHAT),
    Case("allowed_token_ids", "edge", {"allowed_token_ids": list(range(VOCAB_SIZE))}),
    bad("allowed_token_ids", {"allowed_token_ids": [1] * (VOCAB_SIZE + 1)}, "allowed_token_ids", "2049", "2048"),
    bad("allowed_token_ids", {"allowed_token_ids": []}, "allowed_token_ids", "empty"),
    bad("allowed_token_ids", {"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids", "2048", "2047"),
    bad("allowed_token_ids", {"allowed_token_ids": [-1]}, "allowed_token_ids", "-1"),
    Case("bad_words", "valid", {"temperature": 0, "bad_words": ["girl"]}, text=", a little boy"),
    Case("bad_words", "edge", {"temperature": 0, "bad_words": ["little girl"]}, text=", a little boy"),
    Case("bad_words", "edge", {"temperature": 0, "bad_words": ["old girl"]}, text=", a little girl"),
    Case("bad_words", "edge", {"bad_words": []}, CHAT),
    Case("bad_words", "edge", {"bad_words": ["girl"] * 2048}),
    bad("bad_words", {"bad_words": ["girl"] * 4097}, "bad_words", "4097", "4096"),
    bad("bad_words", {"bad_words": [""]}, "bad_words", "empty word"),
    bad("bad_words", {"bad_words": ["a", " "]}, "bad_words", "only spaces"),
    bad("bad_words", {"bad_words": [3]}, "bad_words", "bad_words[0]"),
    bad("bad_words", {"bad_words": ["x" * 2000]}, "bad_words", "2000", "1024"),
    Case(ECHO, "valid", {"echo": True, "temperature": 0}, text=f"{PROMPT}, a little girl"),
    Case(ECHO, "valid", {"echo": True, "logprobs": 2}, check=echoed_places),
    Case(ECHO, "valid", {"echo": True, "n": 2, "prompt": ["One", "Two"], "logprobs": 0}, choices=4),
    Case(ECHO, "edge", {"echo": True, "max_tokens": 0, "logprobs": 1}, tokens=0, finish="length", check=empty_is_null),
    Case(
        ECHO, "edge", {"echo": True, "prompt": [810, 774, 261, 446], "temperature": 0}, text=f"{PROMPT}, a little girl"
    ),
    Case(ECHO, "edge", {"echo": False, "temperature": 0}, text=", a little girl"),
    Case(ECHO, "edge", {"echo": True, "truncate_prompt_tokens": 2, "temperature": 0, "max_tokens": 0}, text=" a time"),
    bad(ECHO, {"echo": "loud"}, "echo", "valid boolean"),
    bad(ECHO, {"echo": True, "logprobs": 21}, "logprobs", "21", "20"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case, client):
    run(case, client)


def test_echoed_log_probabilities_are_those_of_prompt_logprobs(client):
    body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "prompt_logprobs": 0}
    [choice] = client.post(COMPLETIONS, json=body).json()["choices"]
    own = [next(iter(place.values()))["logprob"] for place in choice["prompt_logprobs"][1:]]
    echoed = choice["logprobs"]["token_logprobs"][1:NUM_PROMPT_TOKENS]
    assert all(math.isclose(one, other, abs_tol=1e-6) for one, other in zip(own, echoed, strict=True))


def test_what_cannot_be_sampled_is_minus_9999(client):
    """Raw log-probabilities are before the rules: a token that only a rule forbids has its own."""
    body = {"prompt": PROMPT, "max_tokens": 1, "logit_bias": {"841": 100}, "logprobs": 0}
    [value] = client.post(COMPLETIONS, json=body).json()["choices"][0]["logprobs"]["token_logprobs"]
    assert -9999.0 <= value < 0
