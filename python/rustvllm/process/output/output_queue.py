""":class:`OutputQueue`: writes to a descriptor without ever making the caller wait or fail.

While a pipe has room, a line is written at once. Otherwise it waits in memory for a thread to write it, up to
``LIMIT_BYTES``. Lines that do not fit, or cannot be written, are dropped and counted; a later line reports how many.
"""

import contextlib
import os
import select
import stat
import threading
from collections import deque
from collections.abc import Callable

LIMIT_BYTES = 1 << 20
"""Most bytes that wait in memory. A single piece may be larger if nothing else waits."""
PIECE_OVERHEAD_BYTES = 128
"""Approximate memory of a waiting piece in addition to its text."""
_NOT_READ = "they were not read as fast as they were written"


class OutputQueue:
    """Writes everything that a process prints to one file, in order, from any thread or signal handler.

    Args:
        descriptor: Where to write. A pipe is opened again without blocking, so that native code that writes to the
            descriptor does not wait for the reader either.
        notice: Turns a message about dropped lines into a line of the log, including its line break.
    """

    def __init__(self, descriptor: int, notice: Callable[[str], str]) -> None:
        self._descriptor = descriptor
        self._notice = notice
        self._never_waits = _stop_waiting(descriptor)
        self._pieces: deque[tuple[bytes, int]] = deque()
        """The waiting pieces: text, and the number of lines that are lost if it is dropped."""
        self._waiting_bytes = 0
        self._num_dropped = 0
        self._why_dropped = ""
        self._ends_line = True
        self._is_cut = False
        self._changed = threading.Condition()  # its lock is reentrant: a signal handler may interrupt a put()
        threading.Thread(target=self._run, name="rustvllm-output", daemon=True).start()

    def put(self, text: bytes) -> None:
        """Write ``text``: at once if possible, else from the thread."""
        with self._changed:
            piece = (text, _count_lines(text))
            if self._pieces and self._waiting_bytes + len(text) + PIECE_OVERHEAD_BYTES > LIMIT_BYTES:
                self._drop(piece[1], _NOT_READ)
                return
            piece = self._after_notice(piece)
            if self._never_waits and not self._pieces:
                rest = self._write(piece)
                if rest is None:
                    return
                piece = rest
            self._pieces.append(piece)
            self._waiting_bytes += len(piece[0]) + PIECE_OVERHEAD_BYTES
            self._changed.notify_all()

    def drain(self, seconds: float) -> bool:
        """Wait at most ``seconds`` until everything is written; returns whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pieces, seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pieces)
                if self._why_dropped != _NOT_READ:
                    self._put_notice_first()
                piece = self._pieces[0]
            rest = self._write(piece)  # without the lock, because it may block
            with self._changed:
                self._pieces.popleft()
                self._waiting_bytes -= len(piece[0]) + PIECE_OVERHEAD_BYTES
                if rest is not None:
                    self._pieces.appendleft(rest)
                    self._waiting_bytes += len(rest[0]) + PIECE_OVERHEAD_BYTES
                elif not self._pieces and self._why_dropped == _NOT_READ:  # the reader is back: report what it missed
                    self._pieces.append((b"", 0))
                    self._waiting_bytes += PIECE_OVERHEAD_BYTES
                    self._put_notice_first()
                self._changed.notify_all()
            if rest is not None:
                self._wait_for_room()

    def _write(self, piece: tuple[bytes, int]) -> tuple[bytes, int] | None:
        """Write a piece; returns what is left of it if the pipe is full, else None."""
        text, num_lines = piece
        if self._is_cut:
            text = b"\n" + text
        written = 0
        try:
            while written < len(text):
                written += os.write(self._descriptor, text[written:])
                self._ends_line, self._is_cut = text[written - 1 : written] == b"\n", False
        except BlockingIOError:
            return (text[written:], num_lines) if written else piece
        except OSError as error:
            with self._changed:
                self._is_cut = not self._ends_line
                self._drop(text.count(b"\n", written) if written else num_lines, error.strerror or str(error))
        return None

    def _wait_for_room(self) -> None:
        poller = select.poll()
        poller.register(self._descriptor, select.POLLOUT)
        poller.poll()

    def _put_notice_first(self) -> None:
        first = self._after_notice(self._pieces[0])
        self._waiting_bytes += len(first[0]) - len(self._pieces[0][0])
        self._pieces[0] = first

    def _drop(self, num_lines: int, why: str) -> None:
        self._num_dropped += num_lines
        self._why_dropped = why

    def _after_notice(self, piece: tuple[bytes, int]) -> tuple[bytes, int]:
        """The piece, preceded by a line that reports what was dropped before it, if anything was."""
        if not self._num_dropped:
            return piece
        text, num_lines = piece
        num_dropped, why = self._num_dropped, self._why_dropped
        self._num_dropped, self._why_dropped = 0, ""
        notice = self._notice(describe_dropped(num_dropped, why)).encode("utf-8", "backslashreplace")
        return notice + text, num_dropped + num_lines


def describe_dropped(num_lines: int, why: str) -> str:
    """The message that a log shows in place of dropped lines."""
    if num_lines == 1:
        return f"1 log line was dropped: {why}"
    return f"{num_lines} log lines were dropped: {why}"


def _count_lines(text: bytes) -> int:
    return text.count(b"\n") or 1


def _stop_waiting(descriptor: int) -> bool:
    """Make writes to a full pipe fail instead of waiting; returns whether they do now.

    The pipe is opened a second time for this, because other processes share the flags of the first opening.
    """
    with contextlib.suppress(OSError):  # the pipe belongs to another user, or /proc is not mounted
        if not os.get_blocking(descriptor):
            return True
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            own = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.dup2(own, descriptor)
            os.close(own)
            return True
    return False
