"""JSON that is made in pieces is what the encoder makes in one."""

import json
import random

import pytest

from rustvllm.server.answers.large_answers import _FEW_VALUES, json_pieces


def random_value(rng: random.Random, depth: int) -> object:
    kind = rng.randrange(6 if depth else 4)
    if kind == 4:
        return [random_value(rng, depth - 1) for _ in range(rng.choice([0, 1, 3, 40]))]
    if kind == 5:
        return {f'k{index}é"': random_value(rng, depth - 1) for index in range(rng.randrange(5))}
    return rng.choice([None, True, 1.5, -7, 'a "quoted" ünicode 🦀 text\n', ""])


@pytest.mark.parametrize("seed", range(30))
def test_random_values_alike(seed):
    rng = random.Random(seed)
    value = {"list": [random_value(rng, 3) for _ in range(200)], "other": random_value(rng, 4)}
    assert b"".join(json_pieces(value)) == encoded(value)


@pytest.mark.parametrize(
    "value",
    [
        [{"top_logprobs": [{"a": -1.0, "b": -2.5}] * 20}] * 1500,
        {"choices": [{"index": index, "text": "x"} for index in range(16384)]},
        list(range(1_000_000)),
        {"ids": {"of": {"prompt": list(range(50_000))}}, "empty": [], "nothing": {}},
        [None] + [{"1": {"logprob": -0.5}}] * 9000,
    ],
    ids=["logprobs", "choices", "ids", "nested", "first is null"],
)
def test_large_values_come_in_many_pieces(value):
    pieces = list(json_pieces(value))
    assert b"".join(pieces) == encoded(value)
    assert len(pieces) > 10
    assert max(map(len, pieces)) < 40 * _FEW_VALUES


def test_numbers_that_json_lacks_are_refused_as_the_encoder_refuses_them():
    with pytest.raises(ValueError, match="JSON"):
        list(json_pieces([float("nan")] * 5000))


def encoded(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
