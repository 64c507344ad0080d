""":class:`HandlerThread`: a logging handler that runs in a thread of its own.

For the handlers of a user's configuration in a serving process. A file on a disk that hangs, a pipe that is full, a
collector that does not answer: the process that logs goes on.
"""

import copy
import logging
import queue
import threading
import time

from rustvllm.process.output.output_queue import describe_dropped

MAX_WAITING = 4096
"""Records that may wait for a handler."""


class HandlerThread(logging.Handler):
    """Stands in for ``handler``, which gets the records in order.

    Args:
        handler: Does the work, with its own filters and formatter.
    """

    def __init__(self, handler: logging.Handler) -> None:
        super().__init__(handler.level)
        self.handler = handler
        self._records: queue.Queue[logging.LogRecord | threading.Event] = queue.Queue(MAX_WAITING)
        self._num_dropped = 0
        threading.Thread(target=self._run, name="rustvllm-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Hand a record over, or count it as dropped."""
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
        """Wait until the handler has written everything so far, at most so long; whether it has."""
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
                self.handler.flush()
                item.set()
                continue
            self._handle(item)
            if self._num_dropped and self._records.empty():  # it is as fast as the log again
                self.acquire()
                num_dropped, self._num_dropped = self._num_dropped, 0
                self.release()
                self._handle(_notice(num_dropped))

    def _handle(self, record: logging.LogRecord) -> None:
        try:
            self.handler.handle(record)
        except Exception:  # noqa: BLE001 -- a handler of the user's; the next record may fare better
            self.handler.handleError(record)


def _notice(num_dropped: int) -> logging.LogRecord:
    text = describe_dropped(num_dropped, "this handler was slower than the log")
    return logging.LogRecord("rustvllm.process.output.handler_thread", logging.WARNING, __file__, 0, text, None, None)
