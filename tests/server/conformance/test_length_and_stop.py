"""Rows of the table of parameters: how long an answer is, and what ends it."""

import pytest
from conformance_case import CHAT, COMPLETIONS, MAX_MODEL_LEN, VOCAB_SIZE, Case, bad, run

SWITCHES = "ignore_eos, skip_special_tokens, spaces_between_special_tokens, include_stop_str_in_output"
CHAT_LENGTH = "max_tokens/max_completion_tokens (chat)"
LENGTH = "max_tokens (completions)"
GREEDY = {"temperature": 0, "max_tokens": 16}
STORY = ", a little girl called Clara lived by the kitchen. She lived with her mother"
"""What the model says greedily in sixteen tokens; `` girl`` is id 841, the fourth."""
GIRLS = {**GREEDY, "allowed_token_ids": [841]}
"""Nothing but `` girl``."""
DETECTION = "repetition_detection"
GREETING = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
ANSWER = "Hello! How are you today?"
"""Its greedy answer: seven tokens and ``<|end|>``, id 4, an end of sequence."""


CASES = [
    Case(LENGTH, "valid", {"max_tokens": 5}, finish="length", tokens=5),
    Case(LENGTH, "edge", {"max_tokens": 1}, finish="length", tokens=1),
    Case(LENGTH, "edge", {"max_tokens": None, "ignore_eos": True}, finish="length", tokens=16),
    Case(LENGTH, "edge", {"max_tokens": 0, "echo": True}, finish="length", tokens=0, text="Once upon a time"),
    Case(
        LENGTH,
        "edge",
        {"prompt": [5] * 500, "max_tokens": MAX_MODEL_LEN, "ignore_eos": True},
        finish="length",
        tokens=12,
    ),
    bad(LENGTH, {"max_tokens": 0}, "max_tokens", "at least 1, got 0", "echo"),
    bad(LENGTH, {"max_tokens": -1}, "max_tokens", "-1"),
    bad(LENGTH, {"max_tokens": -1, "echo": True}, "max_tokens", "at least 0, got -1"),
    bad(LENGTH, {"max_tokens": MAX_MODEL_LEN + 1}, "max_tokens", "513", "512"),
    bad(LENGTH, {"max_tokens": 2**40}, "max_tokens", str(2**40), "512"),
    bad(LENGTH, {"max_tokens": "many"}, "max_tokens", "valid integer", "'many'"),
    Case(CHAT_LENGTH, "valid", {**GREETING, "max_tokens": 3}, CHAT, finish="length", tokens=3),
    Case(
        CHAT_LENGTH, "valid", {**GREETING, "max_tokens": 9, "max_completion_tokens": 2}, CHAT, finish="length", tokens=2
    ),
    Case(CHAT_LENGTH, "edge", {**GREETING, "max_tokens": None}, CHAT, finish="stop", tokens=8, text=ANSWER),
    Case(CHAT_LENGTH, "edge", {**GREETING, "max_tokens": 8}, CHAT, finish="stop", tokens=8, text=ANSWER),
    Case(CHAT_LENGTH, "edge", {**GREETING, "max_tokens": 512, "ignore_eos": True}, CHAT, finish="length", tokens=508),
    bad(CHAT_LENGTH, {"max_tokens": 0}, "max_tokens", "at least 1, got 0", url=CHAT),
    bad(CHAT_LENGTH, {"max_completion_tokens": 0}, "max_completion_tokens", "at least 1, got 0", url=CHAT),
    bad(CHAT_LENGTH, {"max_tokens": 1, "max_completion_tokens": 513}, "max_completion_tokens", "513", "512", url=CHAT),
    Case("min_tokens", "valid", {**GREETING, "max_tokens": 16, "min_tokens": 10}, CHAT, finish="length", tokens=16),
    Case("min_tokens", "edge", {**GREETING, "max_tokens": 8, "min_tokens": 8}, CHAT, finish="length", tokens=8),
    Case("min_tokens", "edge", {**GREETING, "max_tokens": None, "min_tokens": 0}, CHAT, finish="stop", tokens=8),
    Case("min_tokens", "edge", {**GREEDY, "stop": " girl", "min_tokens": 8}, finish="length", tokens=16, text=STORY),
    bad("min_tokens", {"min_tokens": 5}, "min_tokens", "at most max_tokens (4), got 5"),
    bad("min_tokens", {"min_tokens": -1}, "min_tokens", "at least 0, got -1"),
    Case("stop", "valid", {**GREEDY, "stop": " girl"}, finish="stop", stop=" girl", tokens=4, text=", a little"),
    Case(
        "stop", "valid", {**GREEDY, "stop": ["xyz", " Clara", "girl"]}, finish="stop", stop="girl", text=", a little "
    ),
    Case("stop", "edge", {**GREEDY, "stop": ["tle girl", "girl"]}, finish="stop", stop="tle girl", text=", a lit"),
    Case("stop", "edge", {**GREEDY, "stop": [" girl", " g"]}, finish="stop", stop=" g", text=", a little"),
    Case("stop", "edge", {**GREEDY, "stop": ["irl", "girl"]}, finish="stop", stop="irl", text=", a little g"),
    Case("stop", "edge", {**GREEDY, "stop": []}, finish="length", text=STORY),
    Case("stop", "edge", {**GREEDY, "stop": None}, finish="length", text=STORY),
    Case("stop", "edge", {**GREEDY, "stop": [f"no{i}" for i in range(20)]}, finish="length", text=STORY),
    Case("stop", "edge", {**GREEDY, "stop": ",  "}, finish="length", text=STORY),
    Case("stop", "edge", {**GREEDY, "stop": ","}, finish="stop", stop=",", tokens=1, text=""),
    Case(
        "stop",
        "valid",
        {**GREETING, "stop": "?", "max_tokens": 16},
        CHAT,
        finish="stop",
        stop="?",
        text=ANSWER[:-1],
        tokens=None,
    ),
    Case("stop", "edge", {**GREEDY, "stop": [f"no{i}" for i in range(1024)]}, finish="length", text=STORY),
    bad("stop", {"stop": [f"no{i}" for i in range(1025)]}, "stop", "1025", "1024"),
    bad("stop", {"stop": ""}, "stop", "empty string"),
    bad("stop", {"stop": ["a", ""]}, "stop", "empty string"),
    bad("stop", {"stop": [1]}, "stop", "valid string"),
    bad("stop", {"stop": {"a": 1}}, "stop", "string"),
    Case(
        "stop_token_ids",
        "valid",
        {**GREEDY, "stop_token_ids": [841]},
        finish="stop",
        stop=841,
        tokens=4,
        text=", a little",
    ),
    Case("stop_token_ids", "edge", {**GREEDY, "stop_token_ids": [VOCAB_SIZE - 1]}, finish="length", text=STORY),
    Case("stop_token_ids", "edge", {**GREEDY, "stop_token_ids": []}, finish="length", text=STORY),
    Case("stop_token_ids", "edge", {**GREETING, "stop_token_ids": [4], "max_tokens": 9}, CHAT, finish="stop", stop=4),
    bad("stop_token_ids", {"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids", "2048", "0 to 2047"),
    bad("stop_token_ids", {"stop_token_ids": [-1]}, "stop_token_ids", "at least 0, got -1"),
    bad("stop_token_ids", {"stop_token_ids": ["a"]}, "stop_token_ids", "stop_token_ids[0]", "'a'"),
    Case(SWITCHES, "valid", {**GREETING, "max_tokens": 20, "ignore_eos": True}, CHAT, finish="length", tokens=20),
    Case(
        SWITCHES, "valid", {**GREETING, "max_tokens": 9, "skip_special_tokens": False}, CHAT, finish="stop", text=ANSWER
    ),
    Case(
        SWITCHES,
        "valid",
        {**GREEDY, "stop": " girl", "include_stop_str_in_output": True},
        finish="stop",
        stop=" girl",
        text=", a little girl",
    ),
    Case(
        SWITCHES,
        "edge",
        {**GREETING, "max_tokens": 20, "ignore_eos": True, "stop_token_ids": [4]},
        CHAT,
        finish="stop",
        stop=4,
        tokens=8,
    ),
    Case(SWITCHES, "edge", {**GREEDY, "spaces_between_special_tokens": False, "skip_special_tokens": None}, text=STORY),
    Case(
        DETECTION,
        "valid",
        {**GIRLS, DETECTION: {"max_pattern_size": 4, "min_count": 3}},
        finish="repetition",
        stop="repetition_detected",
        tokens=3,
        text=" girl" * 3,
    ),
    Case(
        DETECTION,
        "valid",
        {**GREETING, **GIRLS, DETECTION: {"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 3}},
        CHAT,
        finish="repetition",
        stop="repetition_detected",
        tokens=6,
        text=" girl" * 6,
    ),
    Case(
        DETECTION,
        "valid",
        {**GIRLS, "temperature": 1, "n": 3, DETECTION: {"max_pattern_size": 1, "min_count": 5}},
        finish="repetition",
        stop="repetition_detected",
        choices=3,
        tokens=15,
    ),
    Case(
        DETECTION,
        "edge",
        {**GIRLS, "min_tokens": 9, DETECTION: {"max_pattern_size": 1024, "min_count": 2}},
        finish="repetition",
        stop="repetition_detected",
        tokens=9,
    ),
    Case(
        DETECTION,
        "edge",
        {**GIRLS, "stop": "girl girl", DETECTION: {"max_pattern_size": 1, "min_count": 2}},
        finish="stop",
        stop="girl girl",
        tokens=2,
        text=" ",
    ),
    Case(DETECTION, "edge", {**GIRLS, DETECTION: {"max_pattern_size": 1, "min_count": 16}}, finish="length", tokens=16),
    Case(DETECTION, "edge", {**GIRLS, DETECTION: {"max_pattern_size": 9, "min_count": 2**31 - 1}}, finish="length"),
    Case(DETECTION, "edge", {**GIRLS, DETECTION: {}}, finish="length", tokens=16),
    Case(DETECTION, "edge", {**GIRLS, DETECTION: None}, CHAT, finish="length", tokens=16),
    Case(DETECTION, "edge", {**GIRLS, DETECTION: {"max_pattern_size": 0, "min_count": 1}}, finish="length"),
    bad(DETECTION, {DETECTION: {"max_pattern_size": 1025, "min_count": 2}}, DETECTION, "at most 1024, got 1025"),
    bad(DETECTION, {DETECTION: {"max_pattern_size": -1}}, DETECTION, "max_pattern_size", "at least 0, got -1"),
    bad(
        DETECTION,
        {DETECTION: {"max_pattern_size": 4, "min_pattern_size": 5, "min_count": 2}},
        DETECTION,
        "min_pattern_size of repetition_detection must be at most max_pattern_size (4), got 5",
    ),
    bad(DETECTION, {DETECTION: {"min_pattern_size": 1}}, DETECTION, "at most max_pattern_size (0), got 1"),
    bad(DETECTION, {DETECTION: {"max_pattern_size": 4}}, DETECTION, "min_count", "at least 2, got 0", url=CHAT),
    bad(DETECTION, {DETECTION: {"max_pattern_size": 4, "min_count": 2**31}}, DETECTION, "at most 2147483647"),
    bad(DETECTION, {DETECTION: {"max_pattern_size": 4, "min_count": 10**30}}, DETECTION, "at most 2147483647"),
    bad(DETECTION, {DETECTION: {"max_pattern_size": 1.5}}, DETECTION, "repetition_detection.max_pattern_size", "1.5"),
    bad(DETECTION, {DETECTION: {"max_pattern_size": None}}, DETECTION, "valid integer", "null"),
    bad(
        DETECTION,
        {DETECTION: {"max_pattern": 4, "min_count": 2}},
        DETECTION,
        "the unknown field max_pattern; the fields are max_pattern_size, min_pattern_size, min_count",
        url=CHAT,
    ),
    bad(DETECTION, {DETECTION: [4, 0, 3]}, DETECTION, "[4, 0, 3]"),
    bad(DETECTION, {DETECTION: True}, DETECTION, "true"),
    bad(
        DETECTION,
        {"use_beam_search": True, "temperature": 0, DETECTION: {"max_pattern_size": 4, "min_count": 2}},
        DETECTION,
        "cannot be used with use_beam_search",
        streams=False,
    ),
    bad(SWITCHES, {"ignore_eos": "perhaps"}, "ignore_eos", "valid boolean", "'perhaps'"),
    bad(SWITCHES, {"skip_special_tokens": 2}, "skip_special_tokens", "valid boolean"),
    bad(SWITCHES, {"spaces_between_special_tokens": []}, "spaces_between_special_tokens", "valid boolean"),
    bad(SWITCHES, {"include_stop_str_in_output": "x"}, "include_stop_str_in_output", "valid boolean", url=CHAT),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case, client):
    run(case, client)


def test_special_tokens_are_shown_when_asked_for(client):
    body = {**GREETING, "max_tokens": 20, "ignore_eos": True, "skip_special_tokens": False}
    text = client.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
    assert text.startswith(ANSWER + "<|end|>")
    hidden = client.post(CHAT, json={**body, "skip_special_tokens": True}).json()["choices"][0]["message"]["content"]
    assert "<|" not in hidden


def test_a_prompt_that_leaves_no_room_is_refused_and_one_that_leaves_a_token_is_served(client):
    full = {"prompt": [5] * (MAX_MODEL_LEN - 1), "max_tokens": 4}
    assert client.post(COMPLETIONS, json=full).json()["usage"]["completion_tokens"] == 1
    error = client.post(COMPLETIONS, json={**full, "prompt": [5] * MAX_MODEL_LEN}).json()["error"]
    assert error["param"] == "input_tokens"
    assert "maximum context length is 512 tokens" in error["message"]
    assert "your prompt contains 512 input tokens" in error["message"]
