"""Rows of the table of parameters: how many samples are drawn, and from which distribution."""

import math

import pytest
from conformance_case import CHAT, PROMPT, VOCAB_SIZE, Case, bad, run

NUMBER = "valid number"
INTEGER = "valid integer"


def are_different(answer):
    assert len({choice["text"] for choice in answer["choices"]}) > 1


def descends(answer):
    """The best of several samples come best first."""
    sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in answer["choices"]]
    assert sums == sorted(sums, reverse=True)


GREEDY = ", a little girl"
"""What the model says greedily, in four tokens."""

CASES = [
    Case("n", "valid", {"n": 3}, choices=3, tokens=12, check=are_different),
    Case("n", "valid", {"n": 3}, CHAT, choices=3, tokens=12),
    Case("n", "valid", {"n": 2, "prompt": ["One", "Two", "Three"]}, choices=6, tokens=24),
    Case("n", "edge", {"n": 1, "temperature": 0}),
    Case("n", "edge", {"n": None}),
    Case("n", "edge", {"n": 40, "max_tokens": 1}, choices=40, tokens=40),
    bad("n", {"n": 0}, "n", "n must be at least 1, got 0"),
    bad("n", {"n": 16385}, "n", "16385", "16384"),
    bad("n", {"n": 9000, "prompt": ["a", "b"]}, "n", "18000", "16384"),
    bad("n", {"n": 2, "temperature": 0}, "n", "n must be 1 when using greedy sampling, got 2."),
    bad("n", {"n": 2, "temperature": 0}, "n", "n must be 1 when using greedy sampling, got 2.", url=CHAT),
    bad("n", {"n": "two"}, "n", INTEGER, "'two'"),
    bad("n", {"n": 1.5}, "n", INTEGER, "1.5"),
    Case("best_of", "valid", {"best_of": 4, "logprobs": 0}, tokens=16, streams=False),
    Case(
        "best_of", "valid", {"best_of": 4, "n": 2, "logprobs": 0}, choices=2, tokens=16, check=descends, streams=False
    ),
    Case("best_of", "valid", {"best_of": 3}, CHAT, tokens=12, streams=False),
    Case("best_of", "valid", {"best_of": 3, "prompt": ["One", "Two"]}, choices=2, tokens=24, streams=False),
    Case("best_of", "edge", {"best_of": 2, "n": 2}, choices=2, tokens=8),
    Case("best_of", "edge", {"best_of": 1, "temperature": 0}),
    Case("best_of", "edge", {"best_of": None}),
    bad("best_of", {"best_of": 1, "n": 2}, "best_of", "at least n (2), got 1"),
    bad("best_of", {"best_of": 0}, "best_of", "at least 1, got 0"),
    bad("best_of", {"best_of": 16385}, "best_of", "16385", "16384"),
    bad("best_of", {"best_of": 2, "temperature": 0}, "best_of", "1 when using greedy sampling, got 2"),
    bad(
        "best_of", {"best_of": 3, "n": 2, "stream": True}, "best_of", "must be n (2) when the answer is streamed, got 3"
    ),
    bad("best_of", {"best_of": 9000, "prompt": ["a", "b"]}, "best_of", "18000", "16384", streams=False),
    Case("temperature", "valid", {"temperature": 1.3}),
    Case("temperature", "edge", {"temperature": 0}, text=GREEDY),
    Case("temperature", "edge", {"temperature": 9e-6, "top_p": 0.5, "min_p": 0.9}, text=GREEDY),
    Case("temperature", "edge", {"temperature": 1e-5}),
    Case("temperature", "edge", {"temperature": 2}),
    Case("temperature", "edge", {"temperature": None}),
    bad("temperature", {"temperature": -0.1}, "temperature", "[0, 2]", "-0.1"),
    bad("temperature", {"temperature": 2.01}, "temperature", "[0, 2]", "2.01"),
    bad("temperature", {"temperature": "hot"}, "temperature", NUMBER, "'hot'", url=CHAT),
    Case("top_p", "valid", {"top_p": 0.5}),
    Case("top_p", "edge", {"top_p": 1.0}),
    Case("top_p", "edge", {"top_p": 1e-9}, text=GREEDY),
    Case("top_p", "edge", {"top_p": 5e-324, "allowed_token_ids": [1, 2, 3]}),
    bad("top_p", {"top_p": 0}, "top_p", "(0, 1]", "got 0"),
    bad("top_p", {"top_p": 1.1}, "top_p", "(0, 1]", "1.1"),
    bad("top_p", {"top_p": []}, "top_p", NUMBER),
    Case("top_k", "valid", {"top_k": 5}),
    Case("top_k", "edge", {"top_k": 1}, text=GREEDY),
    Case("top_k", "edge", {"top_k": 0}),
    Case("top_k", "edge", {"top_k": -1}),
    Case("top_k", "edge", {"top_k": VOCAB_SIZE * 100}),
    bad("top_k", {"top_k": -2}, "top_k", "at least -1, got -2"),
    bad("top_k", {"top_k": 0.5}, "top_k", INTEGER),
    Case("min_p", "valid", {"min_p": 0.1}),
    Case("min_p", "edge", {"min_p": 0}),
    Case("min_p", "edge", {"min_p": 1}, text=GREEDY),
    bad("min_p", {"min_p": -0.1}, "min_p", "[0, 1]", "-0.1"),
    bad("min_p", {"min_p": 1.5}, "min_p", "[0, 1]", "1.5"),
    Case("top_n_sigma", "valid", {"top_n_sigma": 1.5}),
    Case("top_n_sigma", "valid", {"top_n_sigma": 1.5}, CHAT),
    Case("top_n_sigma", "edge", {"top_n_sigma": 0}),
    Case("top_n_sigma", "edge", {"top_n_sigma": -1}),
    Case("top_n_sigma", "edge", {"top_n_sigma": 1e-9}, text=GREEDY),
    Case("top_n_sigma", "edge", {"top_n_sigma": 1e300}),
    Case("top_n_sigma", "edge", {"top_n_sigma": None}),
    bad("top_n_sigma", {"top_n_sigma": -1.5}, "top_n_sigma", "at least -1", "-1.5"),
    bad("top_n_sigma", {"top_n_sigma": -1.5}, "top_n_sigma", "at least -1", "-1.5", url=CHAT),
    bad("top_n_sigma", {"top_n_sigma": "wide"}, "top_n_sigma", NUMBER, "'wide'"),
    Case("presence_penalty, frequency_penalty", "valid", {"presence_penalty": 1, "frequency_penalty": 0.5}),
    Case("presence_penalty, frequency_penalty", "edge", {"presence_penalty": -2, "frequency_penalty": 2}),
    bad("presence_penalty, frequency_penalty", {"presence_penalty": 2.1}, "presence_penalty", "[-2, 2]", "2.1"),
    bad("presence_penalty, frequency_penalty", {"frequency_penalty": -2.1}, "frequency_penalty", "[-2, 2]", "-2.1"),
    Case("repetition_penalty", "valid", {"repetition_penalty": 1.2}),
    Case("repetition_penalty", "edge", {"repetition_penalty": 1e-3}),
    Case("repetition_penalty", "edge", {"repetition_penalty": 1e308, "logit_bias": {"1": 1}}),
    Case("repetition_penalty", "edge", {"repetition_penalty": 5e-324}),
    bad("repetition_penalty", {"repetition_penalty": 0}, "repetition_penalty", "greater than 0", "got 0"),
    bad("repetition_penalty", {"repetition_penalty": -1}, "repetition_penalty", "greater than 0", "-1"),
    Case("seed", "valid", {"seed": 42}),
    Case("seed", "edge", {"seed": 2**63 - 1}),
    Case("seed", "edge", {"seed": -(2**63), "n": 2}, choices=2),
    Case("seed", "edge", {"seed": -1}, streams=False),
    Case("seed", "edge", {"seed": None}, streams=False),
    bad("seed", {"seed": 2**63}, "seed", str(2**63 - 1)),
    bad("seed", {"seed": "x"}, "seed", INTEGER),
    bad("seed", {"seed": 1e30}, "seed", "seed: input should be a valid integer of at most 64 bits, got 1e+30."),
    bad("seed", {"seed": "9" * 5000}, "seed", "a valid integer of at most 64 bits, got '999"),
    bad("top_k", {"top_k": 1e30}, "top_k", "a valid integer of at most 64 bits, got 1e+30."),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case, client):
    run(case, client)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("name", ["temperature", "repetition_penalty", "top_p"])
def test_numbers_that_are_not_finite_are_no_json(client, name, number):
    body = f'{{"prompt": "a", "{name}": {number}}}'
    response = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "BadRequestError"


def test_the_same_seed_gives_the_same_text_and_another_another(client):
    def text(seed):
        body = {"prompt": PROMPT, "max_tokens": 16, "temperature": 1.5, "seed": seed}
        return client.post("/v1/completions", json=body).json()["choices"][0]["text"]

    assert text(1) == text(1) != text(2)


def test_sample_i_has_seed_plus_i(client):
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 1.0}
    together = client.post("/v1/completions", json={**body, "n": 3, "seed": 5}).json()["choices"]
    alone = [client.post("/v1/completions", json={**body, "seed": 5 + i}).json()["choices"][0] for i in range(3)]
    assert [choice["text"] for choice in together] == [choice["text"] for choice in alone]


def test_best_of_returns_the_likeliest_of_what_n_would(client):
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 1.0, "seed": 11, "logprobs": 0}
    drawn = client.post("/v1/completions", json={**body, "n": 6}).json()["choices"]
    answer = client.post("/v1/completions", json={**body, "n": 2, "best_of": 6}).json()
    by_sum = sorted(drawn, key=lambda choice: -math.fsum(choice["logprobs"]["token_logprobs"]))
    assert [choice["text"] for choice in answer["choices"]] == [choice["text"] for choice in by_sum[:2]]
    drawn_tokens = sum(len(choice["logprobs"]["tokens"]) for choice in drawn)
    assert answer["usage"]["completion_tokens"] == drawn_tokens


def test_best_of_shows_log_probabilities_only_to_those_who_ask(client):
    answer = client.post("/v1/completions", json={"prompt": PROMPT, "best_of": 2, "max_tokens": 2}).json()
    assert answer["choices"][0]["logprobs"] is None


def test_the_models_own_defaults_hold_below_what_a_request_says(client):
    """The embedded model's generation_config says temperature 0.7 and top_p 0.95."""
    body = {"prompt": PROMPT, "max_tokens": 12, "seed": 3}

    def text(**more):
        return client.post("/v1/completions", json={**body, **more}).json()["choices"][0]["text"]

    assert text() == text(temperature=0.7, top_p=0.95) == text(temperature=None)
    assert text(temperature=2.0, top_p=1.0) != text()
