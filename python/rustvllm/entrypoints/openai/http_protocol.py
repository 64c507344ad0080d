"""uvicorn's HTTP protocol with limits: how large the head of a request may be, and how long it may take to arrive.

The parser has none of its own. What it keeps of a header that has not ended is not seen here, only that it goes on
taking bytes without having anything to say; so those are counted.
"""

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

HEAD_SECONDS = 60.0
"""How long the head of a request may take, and a new connection to begin one."""


class _HeadTooLargeError(Exception):
    """Raised in the parser's callbacks to stop it."""


class LimitedProtocol(HttpToolsProtocol):
    """Answers 431 to a head over the limits, 408 to one that does not come to its end, and 400 to what is no HTTP.

    The limits are those of a subclass that :func:`limited_protocol` makes: uvicorn makes protocols by their class.
    """

    max_head_bytes: int
    max_header_count: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_head_bytes = 0
        self._num_headers = 0
        self._num_silent_bytes = 0
        self._has_said_something = False
        self._refusal = (400, "")
        self._head_timer: asyncio.TimerHandle | None = None

    # -- asyncio's callbacks --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._has_said_something = False
        super().data_received(data)
        self._num_silent_bytes = 0 if self._has_said_something else self._num_silent_bytes + len(data)
        if self._num_silent_bytes > self.max_head_bytes and not self.transport.is_closing():
            self._refuse_size()
            self.send_400_response("")

    # -- the parser's callbacks -----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._num_head_bytes = self._num_headers = 0
        self._has_said_something = True
        if self._head_timer is None:  # behind another request on the same connection
            self._watch_head()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > self.max_header_count:
            self._refusal = (
                431,
                f"The request has more than {self.max_header_count} headers (--h11-max-header-count).",
            )
            raise _HeadTooLargeError
        self._count(len(name) + len(value) + 4)  # ": " and the end of the line
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._has_said_something = True
        self._unwatch_head()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._has_said_something = True
        super().on_body(body)

    # -- refusals -------------------------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """Refuse what was noted, else with 400, in the API's form, and close."""
        status, message = self._refusal
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.close()  # in the middle of an answer another cannot begin
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
        self.transport.close()

    def _count(self, num_bytes: int) -> None:
        self._has_said_something = True
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > self.max_head_bytes:
            self._refuse_size()
            raise _HeadTooLargeError

    def _refuse_size(self) -> None:
        self._refusal = (
            431,
            f"The head of the request has more than {self.max_head_bytes} bytes (--h11-max-incomplete-event-size).",
        )

    def _watch_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._on_slow_head)

    def _unwatch_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_slow_head(self) -> None:
        if not self.transport.is_closing():
            self._refusal = (408, f"The head of the request did not arrive within {HEAD_SECONDS:g} seconds.")
            self.send_400_response("")


def limited_protocol(max_head_bytes: int, max_header_count: int) -> type[LimitedProtocol]:
    """The protocol with these limits."""
    limits = {"max_head_bytes": max_head_bytes, "max_header_count": max_header_count}
    return type("LimitedProtocol", (LimitedProtocol,), limits)
