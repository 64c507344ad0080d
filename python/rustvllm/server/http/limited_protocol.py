"""uvicorn's HTTP protocol with limits: how large the head of a request may be, and how long it may take to arrive.

The parser has none of its own, and says nothing of a header that has not ended. So what is counted are the bytes that
it has been given since it last had something whole, which bounds trailers and the extensions of chunks as well.

An answer to a request whose body is still under way, which is mostly a refusal, ends the connection: it says so, and
what the client goes on sending is dropped for a while (:class:`Linger`).
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from rustvllm.server.http.linger import Linger

HEAD_SECONDS = 60.0
"""How long the head of a request may take, and a new connection to begin one."""


class _HeadTooLargeError(Exception):
    """Raised in the parser's callback to stop it."""


class _UnreadTransport:
    """What an answer is written to while its request's body is under way: closing it lingers."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, linger: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = linger


class LimitedProtocol(HttpToolsProtocol):
    """Answers 431 to a head over the limits, 408 to one that does not come to its end, and 400 to what is not HTTP.

    The limits are those of a subclass that :func:`limited_protocol` makes: uvicorn makes protocols by their class.
    """

    max_head_bytes: int
    max_header_count: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Since a head, a piece of a body or a message was complete: what the parser keeps, or goes on reading over.
        self._num_pending_bytes = 0
        self._refusal = (400, "")
        self._timer: asyncio.TimerHandle | None = None
        self._linger: Linger | None = None
        self._is_head_whole = False
        # Whose answer is under way. Requests behind it may be here already, and uvicorn's own is the newest of all.
        self._answered: RequestResponseCycle | None = None
        # Whether the connection may be kept once the body is whole; before that it may not.
        self._may_keep_alive = False

    # -- asyncio's callbacks --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(HEAD_SECONDS, self._on_slow_head)

    def connection_lost(self, exc: Exception | None) -> None:
        self._settle()
        if self._linger is not None:
            self._linger.end()
        self._let_go()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._linger is not None:
            self._linger.drop(data)
            return
        self._num_pending_bytes += len(data)
        super().data_received(data)
        if not self._num_pending_bytes or self.transport.is_closing():
            return
        if self._num_pending_bytes > self.max_head_bytes:
            self._refuse_size()
            self.send_400_response("")
        elif self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self._on_slow_head)

    # -- the parser's callbacks -----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._is_head_whole = False
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_head_whole:  # a trailer: what it says must not be taken for what the head said
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._settle()
        self._is_head_whole = True
        if len(self.headers) > self.max_header_count:
            self._refusal = (
                431,
                f"The request has more than {self.max_header_count} headers (--h11-max-header-count).",
            )
            raise _HeadTooLargeError
        size = len(self.url)
        for name, value in self.headers:
            size += len(name) + len(value) + 4  # ": " and the end of the line
        if size > self.max_head_bytes:
            self._refuse_size()
            raise _HeadTooLargeError
        self._take_host_of_target()
        super().on_headers_complete()
        if not self.pipeline:
            self._answered = self.cycle
        self._may_keep_alive = self.cycle.keep_alive
        self.cycle.keep_alive = False
        self.cycle.transport = _UnreadTransport(self.transport, self._close_later)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        self._settle()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._settle()
        self.cycle.transport = self.transport
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._may_keep_alive
        super().on_message_complete()

    def _take_host_of_target(self) -> None:
        """Let the host in a target such as ``http://host/path`` stand for the header's, as HTTP has it."""
        if self.url[:1] in (b"/", b"*") or [name for name, _ in self.headers].count(b"host") > 1:
            return
        target = httptools.parse_url(self.url)
        if target.host:
            host = b"[%b]" % target.host if b":" in target.host else target.host
            self.headers[:] = [header for header in self.headers if header[0] != b"host"] + [(b"host", host)]

    def _settle(self) -> None:
        self._num_pending_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- the end of an answer -------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._answered = self.pipeline[-1][0]
        super().on_response_complete()
        if self._linger is not None:
            self._unset_keepalive_if_required()  # a shorter patience than that of the linger

    def shutdown(self) -> None:
        self._may_keep_alive = False
        super().shutdown()

    def _close_later(self) -> None:
        """Close when the client has read the answer, for all that can be known."""
        if self._linger is None and not self.transport.is_closing():
            self._settle()
            self.flow.resume_reading()
            self._linger = Linger(self.transport, self.loop)

    def _let_go(self) -> None:
        """For the endpoint that answers, the client is gone."""
        cycle = self._answered
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()

    def _has_all_of(self, cycle: RequestResponseCycle) -> bool:
        """Whether the request of a cycle is here to its end, so that what comes now is another's."""
        return cycle is not self.cycle or not cycle.more_body

    # -- refusals -------------------------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """Refuse what was noted, else with 400, in the API's form, and close."""
        status, message = self._refusal
        cycle = self._answered
        if cycle is not None and not cycle.response_complete and (cycle.response_started or self._has_all_of(cycle)):
            self.transport.close()  # before or in the middle of the answer to another request this one cannot stand
            return
        kind = "BadRequestError" if status == 400 else "RequestHeaderFieldsTooLargeError"
        if status == 408:
            kind = "RequestTimeoutError"
        error = {"message": message or msg, "type": kind, "param": None, "code": status}
        body = json.dumps({"error": error}).encode()
        self.transport.write(
            b"%bcontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (STATUS_LINE[status], len(body), body)
        )
        self._let_go()
        self._close_later()

    def _refuse_size(self) -> None:
        self._refusal = (
            431,
            f"The head of the request has more than {self.max_head_bytes} bytes (--h11-max-incomplete-event-size).",
        )

    def _on_slow_head(self) -> None:
        cycle = self._answered
        if cycle is not None and not cycle.response_complete and self._has_all_of(cycle):
            # Behind a request that is being answered, which must not suffer for it.
            self._timer = self.loop.call_later(HEAD_SECONDS, self._on_slow_head)
        elif not self.transport.is_closing():
            self._refusal = (408, f"The head of the request did not arrive within {HEAD_SECONDS:g} seconds.")
            self.send_400_response("")


def limited_protocol(max_head_bytes: int, max_header_count: int) -> type[LimitedProtocol]:
    """The protocol with these limits."""
    limits = {"max_head_bytes": max_head_bytes, "max_header_count": max_header_count}
    return type("LimitedProtocol", (LimitedProtocol,), limits)
