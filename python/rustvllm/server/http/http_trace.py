"""``HttpTrace``: the first and the last that a server sees of a request, for its trace.

Plain ASGI, and in the application only when something is traced. Paths are noted, bodies, queries and headers are not.
"""

from collections.abc import Sequence
from time import monotonic_ns

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rustvllm.engine.front_tracer import Entry, current_entry
from rustvllm.observe.trace.request_spans import TRACE_HEADERS, trace_context
from rustvllm.observe.trace.tracer import TraceRecord
from rustvllm.server.state import ServerState

_TRACED_METHODS = frozenset({"POST"})
_MAX_PATH_CHARS = 200


class HttpTrace:
    """Notes when a request came, which trace of its client it belongs to, and how it was answered."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection (the ASGI entry point)."""
        if scope["type"] != "http" or scope["method"] not in _TRACED_METHODS:
            await self._app(scope, receive, send)
            return
        names = {name.encode() for name in TRACE_HEADERS}
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in names}
        name = f"{scope['method']} {scope['path'][:_MAX_PATH_CHARS]}"
        entry = Entry(monotonic_ns(), name, trace_context(headers))
        status: int | None = None

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        token = current_entry.set(entry)
        try:
            await self._app(scope, receive, noting)
        finally:
            current_entry.reset(token)
            self._note_end(entry, status)

    def _note_end(self, entry: Entry, status: int | None) -> None:
        if (tracer := self._state.tracer) is None:
            return
        now = monotonic_ns()
        extras = {"request": entry.name, "http_status": status, "total_ms": (now - entry.began_ns) / 1e6}
        ids: Sequence[str | None] = entry.request_ids or (None,)
        for request_id in ids:
            tracer.tracer.write(TraceRecord(now, "response", "sent", request_id, extras=extras, component="APIServer"))
