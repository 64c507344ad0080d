"""Checking a grammar in an API process."""

from types import SimpleNamespace

import pytest

from rustvllm import StructuredOutputsParams
from rustvllm.engine.request import grammar_spec
from rustvllm.exceptions import InvalidRequestError


@pytest.mark.parametrize(("seconds", "num_given_back"), [(0.01, 0), (0.2, 1)])
def test_a_check_that_takes_long_gives_its_memory_back(monkeypatch, seconds, num_given_back):
    times, given_back = iter([5.0, 5.0 + seconds]), []
    monkeypatch.setattr(grammar_spec, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(grammar_spec, "give_back_memory", lambda: given_back.append(True))
    with pytest.raises(InvalidRequestError, match="there is no tokenizer"):
        grammar_spec.make_grammar_spec(StructuredOutputsParams(regex="a+"), None)
    assert len(given_back) == num_given_back
