"""Server-sent events: frames of a stream, and the response that sends them.

Of an event only the text changes from token to token. The rest is rendered once per request; an event is a join of
bytes around a JSON string.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from json.encoder import encode_basestring
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rustvllm.entrypoints.openai.errors import error_event, log_stream_error
from rustvllm.entrypoints.openai.generation import Generation, wait_for_disconnect

DONE = b"data: [DONE]\n\n"


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
    """Sends events until they end, an error ends them, or the client goes away, which closes the generation at once.

    Args:
        events: The stream's events.
        generation: What the events are made of.
        request_id: For the log.
    """

    media_type = "text/event-stream"
    charset = "utf-8"

    def __init__(self, events: AsyncGenerator[bytes, None], generation: Generation, request_id: str) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._generation = generation
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 -- ASGI's signature
        """Serve the stream (the ASGI entry point)."""
        pump = asyncio.ensure_future(self._pump(send))
        watcher = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            await asyncio.wait({pump, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (pump, watcher):
                task.cancel()
            await asyncio.gather(pump, watcher, return_exceptions=True)
            await self._events.aclose()
            await self._generation.aclose()
        if not pump.cancelled() and (exc := pump.exception()) is not None:
            log_stream_error(exc, self._request_id)

    async def _pump(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for events in self._events:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
            except Exception as exc:  # noqa: BLE001 -- becomes an event and a line in the log
                log_stream_error(exc, self._request_id)
                await send({"type": "http.response.body", "body": error_event(exc), "more_body": True})
            await send({"type": "http.response.body", "body": DONE, "more_body": False})
        except OSError:
            return  # the connection broke while writing: as good as a disconnect
