"""The log has one tree and no secrets."""

import io
import json
import logging
import uuid

import pytest

import rustvllm.logger
from rustvllm.exceptions import ConfigError
from rustvllm.logger import (
    _RedactingFormatter,
    _StderrHandler,
    init_logger,
    mask_library,
    redact,
    set_up_again,
    take_over,
)


def test_hub_and_bearer_tokens_are_masked(monkeypatch):
    monkeypatch.setenv("RUSTVLLM_API_KEY", "sesame-open")
    text = redact("hf_abcdefghijklmnop Authorization: Bearer abc.def-1 key sesame-open end")
    assert "abcdefghijklmnop" not in text
    assert "abc.def" not in text
    assert "sesame" not in text
    assert text.endswith(" end")


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


@pytest.fixture
def tree(monkeypatch):
    """A tree of its own for a test; the real one has the handlers of the tests' own runner."""
    root = logging.getLogger(f"tree{uuid.uuid4().hex}")
    monkeypatch.setattr(rustvllm.logger, "_ROOT", root.name)
    yield root
    for handler in root.handlers:
        handler.close()


def test_json_lines(tree, monkeypatch, capsys):
    monkeypatch.setenv("RUSTVLLM_LOGGING_FORMAT", "json")
    logger = init_logger(f"{tree.name}.part")
    logger.warning("two\nlines with %s", "hf_abcdefghijklmnop")
    try:
        raise ValueError("hf_abcdefghijklmnop")
    except ValueError:
        logger.exception("failed")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (
        first.items() >= {"level": "WARNING", "logger": f"{tree.name}.part", "message": "two\nlines with ***"}.items()
    )
    assert first["time"].endswith("Z")
    assert second["exception"].startswith("Traceback")
    assert second["exception"].endswith("ValueError: ***")


def test_the_format_is_checked(tree, monkeypatch):
    monkeypatch.setenv("RUSTVLLM_LOGGING_FORMAT", "xml")
    with pytest.raises(ConfigError, match="must be one of text, json, got 'xml'"):
        init_logger(f"{tree.name}.x")
    assert not tree.handlers


def test_a_command_line_may_change_it(tree, monkeypatch, capsys):
    logger = init_logger(f"{tree.name}.part")
    monkeypatch.setenv("RUSTVLLM_LOGGING_FORMAT", "json")
    set_up_again()
    logger.warning("once")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "once"


def test_an_applications_own_handler_stays(tree):
    own = logging.NullHandler()
    tree.handlers = [own]
    set_up_again()
    assert tree.handlers == [own]


def test_a_library_writes_through_the_tree(tree, capsys):
    init_logger(f"{tree.name}.x")
    library = logging.getLogger("a_library_of_a_test")
    take_over("a_library_of_a_test", logging.WARNING)
    logging.getLogger("a_library_of_a_test.part").warning("key hf_abcdefghijklmnop")
    logging.getLogger("a_library_of_a_test.part").info("not this")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("[a_library_of_a_test.part] key ***")
    library.handlers = []


def test_a_librarys_own_handlers_mask_secrets():
    library, written = logging.getLogger("a_library"), io.StringIO()
    library.addHandler(logging.StreamHandler(written))
    for _ in range(2):
        mask_library("a_library")
    library.warning("from %s", "https://c/x?X-Amz-Signature=ab12")
    assert written.getvalue() == "from https://c/x?X-Amz-Signature=***\n"
    assert len(library.handlers[0].filters) == 1


def test_a_configuration_file_decides_and_secrets_are_masked_all_the_same(tree, monkeypatch, tmp_path):
    out = tmp_path / "out.log"
    config = {
        "version": 1,
        "formatters": {"own": {"format": "%(levelname)s|%(name)s|%(message)s"}},
        "handlers": {"file": {"class": "logging.FileHandler", "filename": str(out), "formatter": "own"}},
        "loggers": {tree.name: {"handlers": ["file"], "level": "DEBUG", "propagate": False}},
    }
    path = tmp_path / "logging.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    earlier = logging.getLogger(f"{tree.name}.earlier")
    monkeypatch.setenv("RUSTVLLM_LOGGING_CONFIG_PATH", str(path))
    logger = init_logger(f"{tree.name}.part")
    logger.debug("with %s", "hf_abcdefghijklmnop")
    earlier.info("not silenced")
    try:
        raise ValueError("hf_abcdefghijklmnop")
    except ValueError:
        logger.exception("failed")
    lines = [line.replace(tree.name, "tree") for line in out.read_text(encoding="utf-8").splitlines()]
    assert lines[:3] == ["DEBUG|tree.part|with ***", "INFO|tree.earlier|not silenced", "ERROR|tree.part|failed"]
    assert lines[-1] == "ValueError: ***"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot read the logging configuration"),
        ("{", "is not JSON"),
        ("[]", "must be a JSON object"),
        ('{"version": 2}', "is wrong: Unsupported version: 2"),
        ('{"handlers": {"a": {"class": "no.such.Class"}}}', "is wrong: Unable to configure handler 'a'"),
    ],
)
def test_a_configuration_file_that_is_wrong(tree, monkeypatch, tmp_path, text, says):
    path = tmp_path / "logging.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    monkeypatch.setenv("RUSTVLLM_LOGGING_CONFIG_PATH", str(path))
    with pytest.raises(ConfigError) as caught:
        init_logger(f"{tree.name}.x")
    assert says in str(caught.value)
