"""``OneCaller``: whose turn it is to run an engine that has no thread of its own."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rustvllm.exceptions import SchedulerStateError, WrongThreadError


class OneCaller:
    """Lets one thread run an engine, and one call at a time.

    A call that came in between would take outputs of the call under way, and end its requests if it failed.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._is_running = False

    def check_thread(self) -> None:
        """Do nothing in the first thread that asks.

        Raises:
            WrongThreadError: This is another one.
        """
        caller = threading.current_thread()
        if self._thread is None:
            self._thread = caller
        if self._thread is not caller:
            raise WrongThreadError(
                f"this LLM belongs to the thread {self._thread.name!r}, the first that called it, and cannot be called "
                f"from {caller.name!r}; use one thread, or AsyncLLM"
            )

    def check(self) -> None:
        """Do nothing if the caller may run the engine.

        Raises:
            SchedulerStateError: A call is under way, or this is another thread (WrongThreadError).
        """
        self.check_thread()
        if self._is_running:
            raise SchedulerStateError(
                "a call of this LLM is under way, and a function that it calls cannot make another one; "
                "enqueue lets prompts wait for their turn"
            )

    @contextmanager
    def run(self) -> Iterator[None]:
        """Run the engine in the body."""
        self.check()
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False
