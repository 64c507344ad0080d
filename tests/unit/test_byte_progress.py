"""How far loading is said to be: a bar on a terminal, lines in the log elsewhere, nothing when it is not wanted."""

import io
import sys

import pytest

from logged import logged
from rustvllm import byte_progress as module
from rustvllm.byte_progress import ByteProgress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def lines():
    with logged("rustvllm.byte_progress") as messages:
        yield messages


def load(*, is_shown=True):
    with ByteProgress("loading", "m", is_shown=is_shown) as progress:
        progress.begin(4 << 30)
        for _ in range(4):
            progress.advance(1 << 30)


def test_a_bar_on_a_terminal(monkeypatch, lines):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    load()
    assert "Loading m" in terminal.getvalue()
    assert "4.00G" in terminal.getvalue()
    assert lines == []


def test_lines_in_the_log_now_and_then(monkeypatch, lines):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    load()
    assert lines == ["loading m: 3.0 of 4.0 GiB after 12 s"]


@pytest.mark.parametrize("terminal", [True, False])
def test_nothing_where_it_is_not_wanted(monkeypatch, lines, terminal):
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(module, "LOG_INTERVAL", 0.0)
    load(is_shown=False)
    assert stream.getvalue() == ""
    assert lines == []
