"""What every request passes before its endpoint: is the server up, is the key right, is the body small enough.

Plain ASGI: nothing here copies a body or stands between a stream and its client.
"""

import asyncio
import hashlib
import hmac
from time import monotonic_ns

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rustvllm.engine.arrival import REQUEST_ARRIVAL
from rustvllm.entrypoints.openai.errors import (
    BadRequestError,
    BodyTooLargeError,
    BodyTooSlowError,
    UnavailableError,
    error_response,
    unauthorized_response,
)
from rustvllm.entrypoints.openai.state import ServerState

BODY_SILENCE_SECONDS = 60.0
"""How long a client may send nothing in the middle of a body."""
_PROBES = frozenset({"/health", "/ping", "/version", "/dashboard", "/dashboard/"})
"""Answered at any time and without a key; the page of the dashboard has no data in it."""
_NO_WORK = frozenset({"/dashboard/events", "/dashboard/journey"})
"""Streams that watch: a stop does not wait for them."""
_GENERATING = frozenset({"/v1/completions", "/v1/chat/completions"})
"""What ``/load`` counts."""


class FrontDoor:
    """Turns away what no endpoint should see, with an OpenAI-shaped error."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._keyless = _PROBES.union(state.settings.http.keyless_paths)
        self._max_body_bytes = state.settings.max_body_bytes
        # Digests have one length, so that comparing them says nothing about the keys.
        self._key_digests = [_digest(key.encode()) for key in state.settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection (the ASGI entry point)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        REQUEST_ARRIVAL.set(monotonic_ns())
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in _PROBES:
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self._key_digests and path not in self._keyless and not self._is_authorized(headers):
            await unauthorized_response()(scope, receive, send)
            return
        try:
            self._state.check_serving()
        except UnavailableError as exc:
            await error_response(exc)(scope, receive, send)
            return
        if scope["http_version"] == "1.1" and [name for name, _ in scope["headers"]].count(b"host") != 1:
            await error_response(BadRequestError("A request has one Host header."))(scope, receive, send)
            return
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._max_body_bytes:
            await error_response(self._too_large(f"{int(length)} bytes"))(scope, receive, send)
            return
        if path in _NO_WORK:
            await self._app(scope, receive, send)
            return
        with self._state.open_request(generates=path in _GENERATING and scope["method"] == "POST"):
            await self._app(scope, self._limited(receive), send)

    def _is_authorized(self, headers: dict[bytes, bytes]) -> bool:
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        digest = _digest(key.strip())
        # Every key is compared, whichever matches, so that the time taken says nothing.
        matches = [hmac.compare_digest(digest, known) for known in self._key_digests]
        return scheme.lower() == b"bearer" and any(matches)

    def _limited(self, receive: Receive) -> Receive:
        """``receive`` that counts, because a chunked body has no length to check beforehand, and waits for so long."""
        received, is_whole = 0, False

        async def limited() -> Message:
            nonlocal received, is_whole
            if is_whole:
                return await receive()  # what comes now is the client's end, whenever that is
            try:
                async with asyncio.timeout(BODY_SILENCE_SECONDS):
                    message = await receive()
            except TimeoutError:
                raise BodyTooSlowError(
                    f"Nothing more of the body has come for {BODY_SILENCE_SECONDS:g} seconds."
                ) from None
            is_whole = not message.get("more_body", False)
            received += len(message.get("body", b""))
            if received > self._max_body_bytes:
                raise self._too_large("more")
            return message

        return limited

    def _too_large(self, size: str) -> BodyTooLargeError:
        return BodyTooLargeError(
            f"The body is {size}; this server takes {self._max_body_bytes} bytes at most (--max-body-bytes)."
        )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
