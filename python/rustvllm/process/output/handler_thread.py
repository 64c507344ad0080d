""":class:`HandlerThread`: runs a logging handler in a thread of its own.

Serving processes do this for the handlers of a user's logging configuration, so that a disk that hangs, a full pipe or
a collector that does not answer cannot hold up the process.
"""

import contextlib
import copy
import logging
import queue
import sys
import threading
import time

from rustvllm.process.output.output_queue import describe_dropped

MAX_WAITING = 4096
"""Most records that wait for a handler; further ones are dropped."""


class HandlerThread(logging.Handler):
    """Takes the place of ``handler`` and passes the records on to it, in order.

    Args:
        handler: The handler that does the work, with its own filters and formatter.
    """

    def __init__(self, handler: logging.Handler) -> None:
        super().__init__(handler.level)
        self.handler = handler
        self._records: queue.Queue[logging.LogRecord | threading.Event] = queue.Queue(MAX_WAITING)
        self._num_dropped = 0
        self._failure = ""
        """What the handler fails with, since the last record that it handled; empty while it works."""
        if type(handler).handleError is logging.Handler.handleError:  # else it has its own way to go on
            handler.handleError = self._note_failure  # type: ignore[method-assign, assignment]
        threading.Thread(target=self._run, name="rustvllm-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record for the thread, or count it as dropped if the queue is full."""
        own = copy.copy(record)  # filters change records, and other handlers format this one at the same time
        own.msg, own.args = record.getMessage(), None
        try:
            if self._num_dropped:
                self._records.put_nowait(_notice(self._num_dropped))
                self._num_dropped = 0
            self._records.put_nowait(own)
        except queue.Full:
            self._num_dropped += 1

    def drain(self, seconds: float) -> bool:
        """Wait at most ``seconds`` until the handler has written everything so far; returns whether it has."""
        deadline = time.monotonic() + seconds
        written = threading.Event()
        try:
            self._records.put(written, timeout=seconds)
        except queue.Full:
            return False
        return written.wait(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while True:
            item = self._records.get()
            if isinstance(item, threading.Event):
                with contextlib.suppress(Exception):  # a line about a full disk came with the record
                    self.handler.flush()
                item.set()
                continue
            self._handle(item)
            if self._num_dropped and self._records.empty():  # the handler has caught up with the log
                self.acquire()
                num_dropped, self._num_dropped = self._num_dropped, 0
                self.release()
                self._handle(_notice(num_dropped))

    def _handle(self, record: logging.LogRecord) -> None:
        before, self._failure = self._failure, ""
        try:
            self.handler.handle(record)
        except Exception:  # noqa: BLE001 -- the user's handler may raise anything; the next record may work
            self.handler.handleError(record)
        if self._failure and self._failure != before and logging.raiseExceptions and sys.stderr is not None:
            sys.stderr.write(
                f"rustvllm: the log handler {self.handler!r} fails ({self._failure}); its lines may be lost until it "
                "works again\n"
            )

    def _note_failure(self, _: logging.LogRecord) -> None:
        """In place of the handler's ``handleError``, which would print a traceback for each record."""
        error = sys.exc_info()[1]
        self._failure = f"{type(error).__name__}: {error}"


def _notice(num_dropped: int) -> logging.LogRecord:
    text = describe_dropped(num_dropped, "this handler was slower than the log")
    return logging.LogRecord("rustvllm.process.output.handler_thread", logging.WARNING, __file__, 0, text, None, None)
