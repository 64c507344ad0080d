"""``DeferredInterrupt``: delays Ctrl-C, and other signals with handlers that may raise, until a step has ended."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGALRM, signal.SIGTERM)
"""Ctrl-C, a timer's alarm, and a job's termination: programs often install handlers for these that raise."""


class Interrupt:
    """Replaces the handlers of signals and keeps those signals that arrive meanwhile, one of each kind."""

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], object]] = {}
        self._came: dict[int, FrameType | None] = {}

    def replace_handlers(self) -> None:
        """Replace every handler that is a Python function."""
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._defer)

    def restore_handlers(self) -> None:
        """Restore the handlers, except where the program has installed another one meanwhile."""
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._defer:
                signal.signal(number, handler)

    def check(self) -> None:
        """Call the handlers of the signals that have arrived; Ctrl-C's default handler raises KeyboardInterrupt."""
        while self._came:
            number, frame = self._came.popitem()
            self._handlers[number](number, frame)

    def _defer(self, number: int, frame: FrameType | None) -> None:
        is_second = number in self._came
        self._came[number] = frame
        if is_second:  # the user insists: do not wait any longer
            self.check()


@contextmanager
def DeferredInterrupt() -> Iterator[Interrupt]:  # noqa: N802 -- reads as the context it is
    """Delay each signal until :meth:`Interrupt.check` or the end of the body, so that it cannot interrupt a step.

    If the same signal arrives a second time before that, its handler is called at once. Outside the main thread this
    does nothing, because Python calls handlers only there.
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
