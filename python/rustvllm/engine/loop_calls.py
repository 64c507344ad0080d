"""Calls into an event loop that may be closed, or that outlives what is called."""

import asyncio
import weakref
from collections.abc import Callable

from rustvllm import _core
from rustvllm.logger import init_logger

logger = init_logger(__name__)


def call_in_loop(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object) -> None:
    """Call in the loop's thread, from any thread; a closed loop calls nothing."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:  # closed already, so nothing waits for the call
        logger.debug("the event loop was closed before the engine")


def call_if_alive(method: "weakref.WeakMethod[Callable[[], None]]") -> None:
    """Call a method whose object the loop must not keep alive, if it still lives."""
    if (call := method()) is not None:
        call()


def remove_reader_soon(loop: asyncio.AbstractEventLoop, handle: "_core.EngineHandle | _core.EngineClient") -> None:
    """Take a dropped engine's file descriptor out of the loop; it lives as long as ``handle``, which is until then.

    Called in whatever thread collects the garbage.
    """
    call_in_loop(loop, _remove_reader, loop, handle)


def _remove_reader(loop: asyncio.AbstractEventLoop, handle: "_core.EngineHandle | _core.EngineClient") -> None:
    loop.remove_reader(handle.output_fd)
