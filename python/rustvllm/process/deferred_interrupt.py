"""``DeferredInterrupt``: Ctrl-C, and other signals whose handlers may raise, wait for the end of a step."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGALRM, signal.SIGTERM)
"""Ctrl-C, what limits the time of a call, and what ends a job: programs have them raise exceptions."""


class Interrupt:
    """Signals that have come while their handlers are replaced, one of each kind."""

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], object]] = {}
        self._came: dict[int, FrameType | None] = {}

    def replace_handlers(self) -> None:
        """Take the place of every handler that is a function of Python."""
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._defer)

    def restore_handlers(self) -> None:
        """Put the handlers back, unless the program has set others meanwhile."""
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._defer:
                signal.signal(number, handler)

    def check(self) -> None:
        """Call the handlers of signals that have come; that of Ctrl-C raises KeyboardInterrupt."""
        while self._came:
            number, frame = self._came.popitem()
            self._handlers[number](number, frame)

    def _defer(self, number: int, frame: FrameType | None) -> None:
        is_second = number in self._came
        self._came[number] = frame
        if is_second:  # does not wait
            self.check()


@contextmanager
def DeferredInterrupt() -> Iterator[Interrupt]:  # noqa: N802 -- reads as the context it is
    """Hold the first signal back until :meth:`Interrupt.check` or the end, never between the halves of a step.

    Handlers are replaced in the main thread alone, where Python calls them; elsewhere nothing changes.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    interrupt.replace_handlers()
    try:
        yield interrupt
    finally:
        interrupt.restore_handlers()
        interrupt.check()
