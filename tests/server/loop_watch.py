"""Measures how much processor time the event loop's thread spends on one callback, whatever else the machine does."""

import asyncio
import gc
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar
from unittest import mock

Result = TypeVar("Result")

_LONGEST_CALLBACK = 0.010
_REFERENCE_SECONDS = 0.0035
"""Processor time of the piece of Python below on an idle core of an AMD EPYC (Zen 3)."""
ATTEMPTS = 3
"""A callback that is long once may be the machine's doing (cold caches); a long piece of work is long each time."""


def longest_callback() -> float:
    """Processor time that one piece of work on the event loop may take in a test, more on a slower machine.

    It is twice the 5 ms that are meant: next to other processes, with cold caches, the same work takes longer.
    """

    def once() -> float:
        begin = time.thread_time()
        json.dumps([{"index": index, "text": str(index)} for index in range(3000)])
        return time.thread_time() - begin

    return _LONGEST_CALLBACK * max(1.0, min(once() for _ in range(5)) / _REFERENCE_SECONDS)


class LoopWatch:
    """What was seen.

    Attributes:
        longest: Processor time of the longest callback, in seconds.
        count: Callbacks.
    """

    def __init__(self) -> None:
        self.longest = 0.0
        self.count = 0


@contextmanager
def watched_loop() -> Iterator[LoopWatch]:
    """Every callback of this process's event loops (not uvloop's), task steps included, is measured meanwhile."""
    watch = LoopWatch()
    run = asyncio.events.Handle._run

    def measured(handle: asyncio.Handle) -> None:
        begin = time.thread_time()
        run(handle)
        watch.longest = max(watch.longest, time.thread_time() - begin)
        watch.count += 1

    with mock.patch.object(asyncio.events.Handle, "_run", measured):
        yield watch


@contextmanager
def no_collections() -> Iterator[None]:
    """No garbage is collected meanwhile: a collection walks over every object of the process."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


async def never_long(work: Callable[[], Awaitable[Result]], *, name: str = "the work") -> Result:
    """Asserts that no callback of some work is long, and returns what the work gives.

    Args:
        work: Is done once, or up to ``ATTEMPTS`` times while a callback is long.
        name: Of the work, for the message.
    """
    limit, longest = longest_callback(), []
    with no_collections():
        while len(longest) < ATTEMPTS and min(longest, default=limit) >= limit:
            with watched_loop() as watch:
                result = await work()
            assert watch.count > 0
            longest.append(watch.longest)
    shown = ", ".join(f"{seconds * 1000:.1f}" for seconds in longest)
    assert min(longest) < limit, f"{name}: {shown} ms of processor time, {limit * 1000:.1f} are possible"
    return result
