"""Schemas through langchain-openai and litellm: what they hand on is valid, of a model that learnt none."""

import json

import pytest
from embedded_server import COMMAND
from server_process import ServerProcess

pytestmark = pytest.mark.timeout(300)  # a program may be slow to start where others run


@pytest.fixture(scope="module")
def server():
    """One that reads the calls of its model, whose template says nothing of them."""
    with ServerProcess([*COMMAND, "--tool-call-parser", "hermes"]) as process:
        process.wait_until_ready()
        yield process


@pytest.fixture(scope="module")
def answers(answers_of):
    return answers_of("structured_calls.py")


def is_animal(value):
    return value.keys() == {"kind", "legs"} and value["kind"] in ("bird", "beast") and 2 <= value["legs"] <= 4


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_parses_structured_output(answers, method):
    found = answers["langchain"][method]
    assert found["finish_reason"] == "stop"
    assert is_animal(found["parsed"])


def test_required_calls_are_valid_or_cut_by_length(answers):
    num_whole = 0
    for answer in answers["langchain"]["required"]:
        if answer["finish_reason"] == "length":
            continue
        assert answer["finish_reason"] == "tool_calls"
        [[name, arguments]] = answer["calls"]
        assert name == "note_animal"
        assert is_animal(arguments)
        num_whole += 1
    assert num_whole > 0, "all were cut"


def test_litellm_gets_what_its_schema_says(answers):
    found = answers["litellm"]["schema"]
    assert found["finish_reason"] == "stop"
    assert is_animal(json.loads(found["text"]))


@pytest.mark.parametrize("kind", ["required", "named"])
def test_litellm_gets_calls_whole_and_streamed(answers, kind):
    num_whole = 0
    for whole, streamed in answers["litellm"][kind]:
        assert streamed["calls"] == whole["calls"]
        [[name, arguments]] = whole["calls"]
        assert name == "note_animal"
        if whole["finish_reason"] == "length":
            continue
        assert whole["finish_reason"] == "tool_calls", "litellm says so of a tool that was named, too"
        assert is_animal(json.loads(arguments))
        num_whole += 1
    assert num_whole > 0, "all were cut"
