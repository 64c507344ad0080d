"""Expressions of an adapter match what Python's ``re`` matches, and neither cost much nor hold other threads up."""

import re
import threading
import time

import pytest

from rustvllm.exceptions import ModelLoadError
from rustvllm.lora.name_patterns import MAX_EXPRESSIONS, NamePatterns, check_expression

MODULES = [
    f"model.layers.{n}.{part}" for n in range(12) for part in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")
]
ENDS = [
    "q_proj", "mlp.up_proj", r"mlp\.up_proj", "1.mlp.up_proj", r".*\.1\..*", r"layers\.[0-3]\.mlp\.(up|down)_proj",
    "proj", "(?!.*attn).*_proj", "model.layers.0.self_attn.q_proj", ".*", "_proj", "l_proj|q_proj",
]  # fmt: skip
EVIL = "(([a-z_.0-9]+)+)+!"


def test_ends_match_as_peft_matches_them():
    patterns = NamePatterns("a", ENDS, [], MODULES)
    for expression in ENDS:
        for module in MODULES:
            expected = re.match(rf"(.*\.)?({expression})$", module) is not None
            assert patterns.first({expression: True}, module, False) == expected, (expression, module)
    values = {expression: index for index, expression in enumerate(ENDS)}
    assert patterns.first(values, "model.layers.1.mlp.up_proj", None) == 1, "the first that matches counts"
    assert patterns.first({}, "model.layers.1.mlp.up_proj", 7) == 7


@pytest.mark.parametrize("expression", [r".*\.mlp\..*", "(?i).*Q_PROJ", "model.layers.0.mlp.up_proj", "up_proj"])
def test_wholes_match_whole_names(expression):
    patterns = NamePatterns("a", [], [expression], MODULES)
    for module in MODULES:
        assert patterns.has_whole(expression, module) == (re.fullmatch(expression, module) is not None)


def test_an_expression_that_takes_for_ever_ends_and_other_threads_run_meanwhile():
    longest, last, is_over = 0.0, time.monotonic(), threading.Event()

    def tick():
        nonlocal longest, last
        while not is_over.wait(0.01):
            longest, last = max(longest, time.monotonic() - last), time.monotonic()

    ticker = threading.Thread(target=tick)
    ticker.start()
    begin = time.process_time()
    try:
        with pytest.raises(
            ModelLoadError, match=r"adapter 'a': .* exceed the limit of 2 seconds .* 36 names of modules"
        ):
            NamePatterns("a", [EVIL], [], MODULES)
    finally:
        is_over.set()
        ticker.join()
    assert time.process_time() - begin < 1, "in this process"
    assert longest < 1


def test_so_many_expressions_are_matched_and_any_number_of_names():
    many = [f"a{number}.*" for number in range(MAX_EXPRESSIONS)]
    patterns = NamePatterns("a", [*many, *(f"b{number}" for number in range(1000))], [], MODULES)
    assert patterns.first({"b7": 7, "a7.*": 8}, "x.a77", None) is None, "none of the modules"
    with pytest.raises(ModelLoadError, match="has 257 regular expressions, but the limit is 256"):
        NamePatterns("a", many, [".*"], MODULES)


@pytest.mark.parametrize("expression", ["(", "*", "(?i)q_proj", "a)(b"])
def test_an_expression_that_is_none_within_a_longer_one(expression):
    with pytest.raises(ValueError, match="position"):
        check_expression(expression)
