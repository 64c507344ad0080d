"""``OneCaller``: allows one call at a time, from one thread, to run an engine that has no thread of its own."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rustvllm.exceptions import SchedulerStateError, WrongThreadError


class OneCaller:
    """Allows only one thread to run an engine, and only one call at a time.

    A second call in the middle of the first would take the first one's outputs, and would end its requests on failure.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._is_running = False

    def check_thread(self) -> None:
        """Check that every call comes from the same thread: the first that called this.

        Raises:
            WrongThreadError: The caller is another thread.
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
        """Check that the caller may run the engine.

        Raises:
            SchedulerStateError: Another call is under way, or the caller is another thread (WrongThreadError).
        """
        self.check_thread()
        if self._is_running:
            raise SchedulerStateError(
                "a call of this LLM is under way, and a function that it calls cannot make another one: return first, "
                "or queue prompts with enqueue before the call"
            )

    @contextmanager
    def run(self) -> Iterator[None]:
        """Context that refuses other calls while its body runs the engine."""
        self.check()
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False
