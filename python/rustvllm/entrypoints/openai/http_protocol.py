"""uvicorn's HTTP protocol with limits: how large the head of a request may be, and how long it may take to arrive.

The parser has none of its own, and says nothing of a header that has not ended. So what is counted are the bytes that
it has been given since it last had something whole, which bounds trailers and the extensions of chunks as well.
"""

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

HEAD_SECONDS = 60.0
"""How long the head of a request may take, and a new connection to begin one."""


class _HeadTooLargeError(Exception):
    """Raised in the parser's callback to stop it."""


class LimitedProtocol(HttpToolsProtocol):
    """Answers 431 to a head over the limits, 408 to one that does not come to its end, and 400 to what is no HTTP.

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

    # -- asyncio's callbacks --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(HEAD_SECONDS, self._on_slow_head)

    def connection_lost(self, exc: Exception | None) -> None:
        self._settle()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
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

    def on_headers_complete(self) -> None:
        self._settle()
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
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._settle()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._settle()
        super().on_message_complete()

    def _settle(self) -> None:
        self._num_pending_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- refusals -------------------------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """Refuse what was noted, else with 400, in the API's form, and close."""
        status, message = self._refusal
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete and (cycle.response_started or not cycle.more_body):
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
        self.transport.close()

    def _refuse_size(self) -> None:
        self._refusal = (
            431,
            f"The head of the request has more than {self.max_head_bytes} bytes (--h11-max-incomplete-event-size).",
        )

    def _on_slow_head(self) -> None:
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete and not cycle.more_body:
            # Behind a request that is being answered, which must not suffer for it.
            self._timer = self.loop.call_later(HEAD_SECONDS, self._on_slow_head)
        elif not self.transport.is_closing():
            self._refusal = (408, f"The head of the request did not arrive within {HEAD_SECONDS:g} seconds.")
            self.send_400_response("")


def limited_protocol(max_head_bytes: int, max_header_count: int) -> type[LimitedProtocol]:
    """The protocol with these limits."""
    limits = {"max_head_bytes": max_head_bytes, "max_header_count": max_header_count}
    return type("LimitedProtocol", (LimitedProtocol,), limits)
