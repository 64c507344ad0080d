"""Server-sent events: frames of a stream, and the response that sends them.

Of an event only the text changes from token to token. The rest is rendered once per request; an event is a join of
bytes around a JSON string.
"""

import json
from collections.abc import AsyncGenerator
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rustvllm.server.errors import log_stream_error
from rustvllm.server.flags.http_settings import DEFAULT_KEEP_ALIVE_SECONDS
from rustvllm.server.http.front_door import DIRECT_SEND
from rustvllm.server.stream.driven import Driven, in_a_task
from rustvllm.server.stream.generation import Generation, wait_for_disconnect

if TYPE_CHECKING:
    from rustvllm.server.stream.chunks import ChunkStream

DONE = b"data: [DONE]\n\n"
_HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
)


def json_string(text: str) -> bytes:
    """``text`` as a JSON string in UTF-8 (the C encoder of ``json`` without its set-up per call)."""
    return encode_basestring(text).encode()


def json_bytes(value: Any) -> bytes:
    """``value`` as compact JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def event(value: Any) -> bytes:
    """One whole event."""
    return b"data: " + json_bytes(value) + b"\n\n"


class EventStreamResponse(Response):
    """Sends a stream to its end, to an error, or until the client goes away, which closes the generation at once.

    The response begins with the first event: what fails before it is answered with the status it deserves.

    Args:
        stream: Renders the events that the core does not, and writes all.
        generation: What the events are made of.
        request_id: For the log.
        keep_alive_seconds: After so long without an event a comment is sent; 0: never.
    """

    media_type = "text/event-stream"
    charset = "utf-8"
    background = None
    status_code = 200

    def __init__(
        self,
        stream: "ChunkStream",
        generation: Generation,
        request_id: str,
        keep_alive_seconds: float = DEFAULT_KEEP_ALIVE_SECONDS,
    ) -> None:
        # Response.__init__ would make the same headers anew each time, and a body's length among them.
        self.raw_headers = list(_HEADERS)
        self._stream = stream
        self._writer = stream.writer
        self._generation = generation
        self._request_id = request_id
        self._keep_alive_seconds = keep_alive_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the stream (the ASGI entry point)."""

        async def begin() -> None:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

        if DIRECT_SEND in scope:
            # Middleware has to see that the response begins, not each of its thousands of events.
            body: Send = scope[DIRECT_SEND]
        else:
            # Unless it is the user's own: that sees everything, and may wait in ways that need a task.
            send = body = in_a_task(send)
            receive = in_a_task(receive)
        self._stream.follow(self._generation)
        self._writer.attach(begin, body, self._keep_alive_seconds)
        gone = Driven(
            wait_for_disconnect(receive), lambda _: self._writer.fail(ConnectionResetError("the client went away"))
        )
        events = self._stream.events(self._generation)
        try:
            await self._pump(events)
        except Exception as exc:
            if not self._writer.is_started:
                raise  # an endpoint's error as any other
            log_stream_error(exc, self._request_id)
        finally:
            gone.close()
            self._writer.close()
            await events.aclose()
            await self._generation.aclose()

    async def _pump(self, events: AsyncGenerator[bytes, None]) -> None:
        try:
            try:
                async for some in events:
                    await self._writer.send(some)
            except Exception as exc:
                if not self._writer.is_started or self._writer.failure is not None:
                    raise
                log_stream_error(exc, self._request_id)
                await self._writer.send(self._stream.error(exc))
            await self._writer.finish(self._stream.end)
        except OSError:
            return  # the connection broke while writing: as good as a disconnect
