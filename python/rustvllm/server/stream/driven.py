""":class:`Driven`: a coroutine that the event loop runs without a task.

For coroutines that seldom wait, or wait for one thing only. A task costs several microseconds to make, to wake and to
put to sleep, which a coroutine that comes through at once never pays here.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def in_a_task(function: Callable[..., Awaitable[T]]) -> Callable[..., Coroutine[Any, Any, T]]:
    """``function`` for a :class:`Driven` to await, when it may need what only a task has."""

    async def run(*arguments: Any) -> T:
        task = asyncio.ensure_future(function(*arguments))
        try:
            return await task
        finally:
            task.cancel()

    return run


class Driven:
    """Runs a coroutine: at once up to where it has to wait, then on from there.

    What it awaits must be futures of asyncio or bare yields, as it is in ASGI's ``send`` and ``receive``; it is not a
    task, so ``asyncio.timeout`` and the like do not work in it.

    Args:
        coroutine: To be run.
        on_end: Called with None when it has come to its end, else with what it raised. Called by the constructor itself
            when there is nothing to wait for.

    Attributes:
        is_done: It has ended or was closed.
    """

    __slots__ = ("_coroutine", "_on_end", "is_done")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], on_end: Callable[[Exception | None], None]) -> None:
        self._coroutine = coroutine
        self._on_end = on_end
        self.is_done = False
        self._step()

    def close(self) -> None:
        """Give it up where it waits; ``on_end`` is not called."""
        if not self.is_done:
            self.is_done = True
            self._coroutine.close()

    def _step(self, _: Any = None) -> None:
        if self.is_done:
            return
        try:
            awaited = self._coroutine.send(None)
        except StopIteration:
            self._end(None)
        except Exception as error:  # noqa: BLE001 -- on_end decides
            self._end(error)
        else:
            if awaited is None:
                asyncio.get_running_loop().call_soon(self._step)
            else:
                awaited.add_done_callback(self._step)

    def _end(self, error: Exception | None) -> None:
        self.is_done = True
        self._on_end(error)
