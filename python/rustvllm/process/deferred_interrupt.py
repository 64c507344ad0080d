"""``DeferredInterrupt``: Ctrl-C that waits for the end of a step."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Whether Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.pressed = False

    def check(self) -> None:
        """Raise KeyboardInterrupt when it was."""
        if self.pressed:
            raise KeyboardInterrupt


@contextmanager
def DeferredInterrupt() -> Iterator[Interrupt]:  # noqa: N802 -- reads as the context it is
    """Hold the first Ctrl-C back until :meth:`Interrupt.check`, so that it never falls between the halves of a step.

    Only Python's own handler is replaced, and only in the main thread; elsewhere nothing changes.
    """
    interrupt = Interrupt()
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield interrupt
        return

    def on_sigint(number: int, frame: FrameType | None) -> None:
        if interrupt.pressed:  # the second one does not wait
            signal.default_int_handler(number, frame)
        interrupt.pressed = True

    signal.signal(signal.SIGINT, on_sigint)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
