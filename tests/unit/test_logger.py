"""The log has one tree and no secrets."""

import logging

import pytest

from rustvllm.exceptions import ConfigError
from rustvllm.logger import _RedactingFormatter, _StderrHandler, init_logger, redact, redact_mapping


def test_hub_and_bearer_tokens_are_masked(monkeypatch):
    monkeypatch.setenv("RUSTVLLM_API_KEY", "sesame-open")
    text = redact("hf_abcdefghijklmnop Authorization: Bearer abc.def-1 key sesame-open end")
    assert "abcdefghijklmnop" not in text
    assert "abc.def" not in text
    assert "sesame" not in text
    assert text.endswith(" end")


def test_mapping_masks_by_name():
    assert redact_mapping({"api_key": "x", "hf_token": "y", "max_num_batched_tokens": 5, "secret": None}) == {
        "api_key": "***",
        "hf_token": "***",
        "max_num_batched_tokens": 5,
        "secret": None,
    }


def test_arguments_and_tracebacks_are_masked():
    try:
        raise ValueError("bad hf_abcdefghijklmnop")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("rustvllm.x", logging.INFO, __file__, 1, "with %s", ("hf_qrstuvwxyzabcd",), info)
    line = _RedactingFormatter("%(message)s").format(record)
    assert "hf_" not in line
    assert "ValueError: bad ***" in line


def test_one_handler_for_the_tree():
    first, second = init_logger("rustvllm.a"), init_logger("rustvllm.b.c")
    root = logging.getLogger("rustvllm")
    assert sum(isinstance(handler, _StderrHandler) for handler in root.handlers) == 1
    assert not first.handlers
    assert not second.handlers
    assert root.propagate is False


def test_level_is_checked(monkeypatch):
    monkeypatch.setenv("RUSTVLLM_LOGGING_LEVEL", "LOUD")
    root = logging.getLogger("rustvllm")
    kept, root.handlers = root.handlers, []
    try:
        with pytest.raises(ConfigError, match="got 'LOUD'"):
            init_logger("rustvllm.x")
    finally:
        root.handlers = kept
