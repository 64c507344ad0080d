"""Standard output, standard error and logging of a serving process: never wait for a reader, never fail without one.

The processes of a server (launcher, API, engine) call :func:`begin` before they load anything. Other commands, and
programs that use the package, write to their streams directly.
"""

import atexit
import contextlib
import io
import logging
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from rustvllm.logger import format_line
from rustvllm.process.output.handler_thread import HandlerThread
from rustvllm.process.output.output_queue import OutputQueue
from rustvllm.process.output.standard_streams import open_missing

DRAIN_SECONDS = 0.3
"""How long a process may still write while it ends; must be less than ``HARD_STOP_SECONDS`` of an API process."""

_queues: list[OutputQueue] = []
_handlers: list[HandlerThread] = []


class _Raw(io.RawIOBase):
    """The raw layer below a text stream; writes to a queue."""

    def __init__(self, queue: OutputQueue, descriptor: int, name: str) -> None:
        self._queue = queue
        self._descriptor = descriptor
        self.name = name

    def write(self, data: Any) -> int:
        text = bytes(data)
        self._queue.put(text)
        return len(text)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)


def begin() -> None:
    """Redirect what this process prints and logs, so that it can neither block nor fail. A second call does nothing."""
    open_missing()
    if _queues:
        return
    before = {id(stream): name for name in ("stdout", "stderr") if (stream := getattr(sys, name)) is not None}
    for name in before.values():
        with contextlib.suppress(OSError, ValueError):
            getattr(sys, name).flush()
    error = OutputQueue(2, _notice)
    # One queue if both are the same file, so that its lines stay in order.
    out = error if _is_same_file(1, 2) else OutputQueue(1, _notice)
    _queues.extend({out, error})
    sys.stdout, sys.stderr = _stream(out, 1, "<stdout>"), _stream(error, 2, "<stderr>")
    for handler in _all_handlers():
        if isinstance(handler, logging.StreamHandler) and id(handler.stream) in before:
            handler.setStream(getattr(sys, before[id(handler.stream)]))
    detach_handlers()
    atexit.register(drain)


def detach_handlers() -> None:
    """Move every handler of the user's logging configuration to a thread of its own."""
    for logger in _all_loggers():
        for index, handler in enumerate(logger.handlers):
            if not _is_ours(handler):
                logger.handlers[index] = _detached(handler)


def drain() -> None:
    """Wait at most ``DRAIN_SECONDS`` until everything printed and logged is written."""
    deadline = time.monotonic() + DRAIN_SECONDS
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError):  # the stream is closed
            stream.flush()  # the text after the last line break
    waiting: list[HandlerThread | OutputQueue] = [*_handlers, *_queues]
    for index, each in enumerate(waiting):  # each gets its share of the time, even if an earlier one has stalled
        each.drain(max(0.0, deadline - time.monotonic()) / (len(waiting) - index))


def leave(exit_code: int) -> NoReturn:
    """Write what was printed and logged, then end the process without further clean-up."""
    drain()
    os._exit(exit_code)


def _stream(queue: OutputQueue, descriptor: int, name: str) -> io.TextIOWrapper:
    raw = _Raw(queue, descriptor, name)
    # No buffer in between: its lock is not reentrant, and a signal handler may print.
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _is_same_file(first: int, second: int) -> bool:
    one, other = os.fstat(first), os.fstat(second)
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)


def _notice(message: str) -> str:
    return format_line(__name__, logging.WARNING, message) + "\n"


def _detached(handler: logging.Handler) -> HandlerThread:
    for each in _handlers:
        if each.handler is handler:
            return each
    # At exit, logging.shutdown would wait for a handler's lock without a limit; drain() has one.
    atexit.unregister(logging.shutdown)
    _handlers.append(HandlerThread(handler))
    return _handlers[-1]


def _is_ours(handler: logging.Handler) -> bool:
    """Whether a handler never blocks: it writes to one of the queues, or nowhere."""
    if isinstance(handler, HandlerThread | logging.NullHandler):
        return True
    return isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stdout, sys.stderr)


def _all_loggers() -> Iterator[logging.Logger]:
    yield logging.getLogger()
    for logger in list(logging.Logger.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            yield logger


def _all_handlers() -> Iterator[logging.Handler]:
    for logger in _all_loggers():
        yield from logger.handlers
