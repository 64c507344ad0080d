"""A handler in its own thread gets unchanged records in order, and a count of those that were dropped."""

import contextlib
import logging
import threading

import pytest

from rustvllm.process.output import handler_thread
from rustvllm.process.output.handler_thread import HandlerThread


class Slow(logging.Handler):
    """A handler that waits before each record until the test lets it continue."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Semaphore(0)
        self.lines: list[str] = []
        self.begun = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.begun.set()
        self.gate.acquire()
        if "raise" in record.getMessage():
            raise ValueError(record.getMessage())
        self.lines.append(record.getMessage())


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.setattr(handler_thread, "MAX_WAITING", 4)
    monkeypatch.setattr(logging, "raiseExceptions", False)
    handler = Slow()
    yield handler
    handler.gate.release(1000)


@pytest.fixture
def logger(slow):
    logger = logging.Logger("a_test")  # noqa: LOG001 -- not one of the tree
    logger.addHandler(HandlerThread(slow))
    return logger


def test_records_come_in_order_and_as_they_were(slow, logger):
    value = ["first"]
    logger.warning("%s", value)
    value[0] = "second"
    logger.warning("%s", value)
    slow.gate.release(2)
    assert logger.handlers[0].drain(10)
    assert slow.lines == ["['first']", "['second']"]


def test_what_it_is_too_slow_for_is_dropped_and_told(slow, logger):
    logger.warning("0")
    assert slow.begun.wait(10)
    for number in range(1, 8):  # one is with the handler, four wait
        logger.warning("%d", number)
    assert not logger.handlers[0].drain(0.01)
    slow.gate.release(1000)
    assert logger.handlers[0].drain(10)
    assert slow.lines == [*"01234", "3 log lines were dropped: this handler was slower than the log"]
    logger.warning("later")
    assert logger.handlers[0].drain(10)
    assert slow.lines[-1] == "later"


def test_a_handler_that_raises_gets_the_next_record_all_the_same(slow, logger):
    slow.gate.release(1000)
    logger.warning("raise")
    logger.warning("fine")
    assert logger.handlers[0].drain(10)
    assert slow.lines == ["fine"]


def test_a_full_disk_is_told_in_one_line_and_again_after_it_worked(monkeypatch, capsys):
    handler = logging.FileHandler("/dev/full")
    logger = logging.Logger("a_test")  # noqa: LOG001 -- not one of the tree
    logger.addHandler(HandlerThread(handler))
    for number in range(3):
        logger.warning("%d", number)
    assert logger.handlers[0].drain(10)
    assert logger.handlers[0].drain(10), "the thread goes on"
    [line] = capsys.readouterr().err.splitlines()
    assert line == (
        f"rustvllm: the log handler {handler!r} fails (OSError: [Errno 28] No space left on device); its lines may be "
        "lost until it works again"
    )
    for emit in (lambda _: None, None):
        with monkeypatch.context() as patch:
            if emit is not None:
                patch.setattr(handler, "emit", emit)
            logger.warning("more")
            assert logger.handlers[0].drain(10)
    assert len(capsys.readouterr().err.splitlines()) == 1
    with contextlib.suppress(OSError):
        handler.close()
