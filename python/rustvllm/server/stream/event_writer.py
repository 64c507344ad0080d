""":class:`EventWriter`: a stream's events, written to its client straight from the event loop's callback.

A task per stream would be woken, run and put to sleep again for every token, which costs more than the write. ``send``
is a coroutine that waits only while the client does not read; so it is run on the spot, and goes on by itself when
there was something to wait for.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.types import Message, Send

from rustvllm.server.flags.http_settings import DEFAULT_KEEP_ALIVE_SECONDS
from rustvllm.server.stream.driven import Driven

KEEP_ALIVE_COMMENT = b": waiting\n\n"
"""Goes out when a stream has been silent for a while, so that no proxy on the way takes it for dead."""


class EventWriter:
    """Writes events in their order. Belongs to one event loop.

    The response begins with the first event. So an error before it can still be an answer of its own.

    Args:
        on_change: Called when the client reads again after :meth:`write` had returned False, and when the connection to
            it is broken.

    Attributes:
        is_started: The response has begun.
        failure: What broke the connection to the client.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._send: Send | None = None
        self._begin: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._backlog: list[bytes] = []
        self._is_busy = True  # until it is attached, and whenever the client does not read
        self._idle = asyncio.Event()
        self._waiting: Driven | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._num_written = 0
        self._keep_alive_seconds = DEFAULT_KEEP_ALIVE_SECONDS
        self.is_started = False
        self.failure: Exception | None = None

    def attach(
        self,
        begin: Callable[[], Coroutine[Any, Any, None]],
        send: Send,
        keep_alive_seconds: float = DEFAULT_KEEP_ALIVE_SECONDS,
    ) -> None:
        """Start to write.

        Args:
            begin: Sends the head of the response.
            send: Sends its body; may be a shorter way to the client than that of the head.
            keep_alive_seconds: After so long without an event a comment is sent; 0: never.
        """
        self._keep_alive_seconds = keep_alive_seconds
        self._begin, self._send = begin, send
        self._is_busy = False
        self._flush()
        if keep_alive_seconds:
            self._watch_silence(-1)

    def write(self, events: bytes) -> bool:
        """Send events, or keep them until that is possible; whether more can be taken now."""
        if self._is_busy:
            self._backlog.append(events)
            return False
        self._num_written += 1
        self._drive(self._start(events) if not self.is_started else self._body(events))
        return not self._is_busy

    async def send(self, events: bytes) -> None:
        """Write events and wait until they are gone.

        Raises:
            Exception: What the connection to the client failed with.
        """
        if not self.write(events):
            self._idle.clear()
            if self._is_busy and self.failure is None:
                await self._idle.wait()
        if self.failure is not None:
            raise self.failure

    async def finish(self, events: bytes) -> None:
        """Write the last events and end the response."""
        await self.send(events)
        assert self._send is not None
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def close(self) -> None:
        """Write nothing more."""
        self._is_busy = True
        self._backlog.clear()
        if self._timer is not None:
            self._timer.cancel()
        if self._waiting is not None:
            self._waiting.close()
            self._waiting = None

    def fail(self, error: Exception) -> None:
        """Write nothing more; who waits for :meth:`send` gets the error."""
        self.failure = error
        self.close()
        self._idle.set()
        # Not on the spot: the engine may be in the middle of handing this an event.
        asyncio.get_running_loop().call_soon(self._on_change)

    def _body(self, events: bytes) -> Coroutine[Any, Any, None]:
        assert self._send is not None
        message: Message = {"type": "http.response.body", "body": events, "more_body": True}
        return self._send(message)  # type: ignore[return-value]  # an ASGI server's send is a coroutine

    async def _start(self, events: bytes) -> None:
        assert self._begin is not None
        self.is_started = True
        await self._begin()
        await self._body(events)

    def _drive(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._is_busy = True
        driven = Driven(coroutine, self._on_sent)
        if not driven.is_done:
            self._waiting = driven

    def _on_sent(self, error: Exception | None) -> None:
        if error is not None:
            self.fail(error)
            return
        self._is_busy = False
        if self._waiting is not None:  # what has come meanwhile was kept
            self._waiting = None
            self._flush()

    def _flush(self) -> None:
        """Write what was kept, then let the others know."""
        if self._backlog:
            events = b"".join(self._backlog)
            self._backlog.clear()
            if not self.write(events):
                return
        if not self._idle.is_set():
            self._idle.set()
        self._on_change()

    def _watch_silence(self, num_written: int) -> None:
        if self._num_written == num_written and not self._is_busy:
            self.write(KEEP_ALIVE_COMMENT)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._keep_alive_seconds, self._watch_silence, self._num_written)
