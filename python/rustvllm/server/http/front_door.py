"""What every request passes before its endpoint: the checks of host, key, state of the server and size of the body.

The host comes first (:class:`HostCheck`). A page elsewhere can point a name of its own at this machine (DNS rebinding).
For the browser, page and server are then of one origin, so the page may send requests and read the answers; the name in
its ``Host`` header gives it away.

Plain ASGI: nothing here copies a body or stands between a stream and its client. After the :class:`FrontDoor` the
endpoints that every token's time depends on are called at once, without the framework (:class:`DirectRoutes`).
"""

import asyncio
import hashlib
import hmac
from collections.abc import Awaitable, Callable, Iterable, Mapping
from http import HTTPStatus
from itertools import chain, repeat
from time import monotonic_ns
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rustvllm.server.error_bodies import MESSAGES_PATH, path_of
from rustvllm.server.errors import (
    BadRequestError,
    BodyTooLargeError,
    BodyTooSlowError,
    ServerError,
    UnavailableError,
    error_response,
    unauthorized_response,
)
from rustvllm.server.flags.host_names import host_name, is_among, is_loopback
from rustvllm.server.http.endpoint import Endpoint
from rustvllm.server.state import ServerState
from rustvllm.tenant import Tenant

ARRIVAL_NS: Final = "rustvllm.arrival_ns"
"""In the ASGI scope: when the request came in, in nanoseconds of CLOCK_MONOTONIC; its latencies count from then."""
TENANT: Final = "rustvllm.tenant"
"""In the ASGI scope: the :class:`~rustvllm.tenant.Tenant` whose key the request has; absent without keys."""
DIRECT_SEND: Final = "rustvllm.direct_send"
"""In the ASGI scope: ``send`` as it was before any layer wrapped it, for what only the client needs to see."""
BODY_SILENCE_SECONDS = 60.0
"""How long a client may send nothing in the middle of a body."""
OWN_PAGES = "/dashboard"
"""The server's own pages are at this path and below it."""
_MAX_SHOWN_CHARACTERS = 128
_MAX_REMEMBERED = 64
"""Headers that named the loopback: a server sees the same one with almost every request."""

DirectHandler = Callable[[Request], Awaitable[Response]]
ExceptionHandler = Callable[[Request, Exception], Awaitable[Response]]


class UnknownHostError(ServerError):
    """The request is for a host that this server is not."""

    status = HTTPStatus.FORBIDDEN


class HostCheck:
    """Middleware that refuses requests for other hosts; names of the loopback are always this server's.

    A request without ``Host`` passes: browsers always send one.

    Args:
        app: Answers.
        allowed: Further names, as :func:`is_among` reads them; None: any.
        local_pages: Whether the server's own pages are for names of the loopback alone.
    """

    def __init__(self, app: ASGIApp, allowed: tuple[str, ...] | None, *, local_pages: bool) -> None:
        self._app = app
        self._allowed = allowed
        self._local_pages = local_pages
        self._loopback_headers: set[bytes] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (the ASGI entry point)."""
        if scope["type"] == "http":
            hosts = [value for name, value in scope["headers"] if name == b"host"]
            if refusal := self._refusal(scope, hosts):
                await error_response(refusal, path_of(scope))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope, hosts: list[bytes]) -> ServerError | None:
        if len(hosts) > 1:
            return BadRequestError(f"The request must have exactly one Host header; this one has {len(hosts)}.")
        if not hosts:
            return None
        if hosts[0] in self._loopback_headers:
            return None
        header = hosts[0].decode("latin-1")
        name = host_name(header)
        if name is not None and is_loopback(name):
            if len(self._loopback_headers) < _MAX_REMEMBERED and len(header) <= _MAX_SHOWN_CHARACTERS:
                self._loopback_headers.add(hosts[0])
            return None
        shown = repr(header[:_MAX_SHOWN_CHARACTERS])
        if self._allowed is not None and not (name is not None and is_among(name, self._allowed)):
            return UnknownHostError(
                f"This server does not answer to the host {shown}. Use localhost or 127.0.0.1, or start the server "
                "with --allowed-hosts and its host names (--allowed-hosts '*' allows any)."
            )
        if self._local_pages and is_own_page(scope):
            return UnknownHostError(
                f"The live page is only for this machine, and {shown} is not a name of it; open the page at localhost "
                "or 127.0.0.1, or start the server with --enable-dashboard to serve it under every allowed name "
                "(--allowed-hosts)."
            )
        return None


def is_own_page(scope: Scope) -> bool:
    """Whether a request is for one of the server's own pages."""
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    return bool(path == OWN_PAGES or path.startswith(OWN_PAGES + "/"))


class FrontDoor:
    """Turns away what no endpoint should see, with an OpenAI-shaped error.

    Args:
        app: Answers what may pass.
        state: Of the server.
        endpoints: Say what guards their paths; any other path has all guards.
    """

    def __init__(self, app: ASGIApp, state: ServerState, endpoints: Iterable[Endpoint]) -> None:
        self._app = app
        self._state = state
        rows = tuple(endpoints)
        self._open = frozenset(row.path for row in rows if row.is_open)
        self._watching = frozenset(row.path for row in rows if row.is_watching)
        self._generating = frozenset((row.method, row.path) for row in rows if row.generates)
        self._keyless = frozenset(state.settings.http.keyless_paths)
        self._max_body_bytes = state.settings.max_body_bytes
        # Digests have one length, so that comparing them says nothing about the keys.
        self._key_digests = [_digest(key.encode()) for key in state.settings.api_keys]
        weights = chain(state.settings.key_weights, repeat(1))
        self._tenants = [
            Tenant(key, weight=weight) for key, weight in zip(state.settings.api_keys, weights, strict=False)
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection (the ASGI entry point)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[ARRIVAL_NS] = monotonic_ns()
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in self._open:
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self._key_digests and _count(scope, b"authorization") > 1:
            # A proxy in front may have looked at another one than we would.
            error = BadRequestError("The request must have at most one Authorization header.")
            await error_response(error, path)(scope, receive, send)
            return
        if self._key_digests and path not in self._keyless:
            tenant = self._tenant_of(headers, takes_api_key=path.startswith(MESSAGES_PATH))
            if tenant is None:
                await unauthorized_response(path)(scope, receive, send)
                return
            scope[TENANT] = tenant
        try:
            self._state.check_serving()
        except UnavailableError as exc:
            await error_response(exc, path)(scope, receive, send)
            return
        if scope["http_version"] != "1.0" and b"host" not in headers:
            await error_response(BadRequestError("The request must have exactly one Host header."), path)(
                scope, receive, send
            )
            return
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._max_body_bytes:
            await error_response(self._too_large(f"{int(length)} bytes"), path)(scope, receive, send)
            return
        if path in self._watching:
            await self._app(scope, receive, send)
            return
        with self._state.open_request(generates=(scope["method"], path) in self._generating):
            await self._app(scope, self._limited(receive), send)

    def _tenant_of(self, headers: dict[bytes, bytes], *, takes_api_key: bool) -> Tenant | None:
        """Whose key a request has, where clients may send it as ``x-api-key``, too; None: it has none of ours."""
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if takes_api_key and not key:
            scheme, key = b"bearer", headers.get(b"x-api-key", b"")
        digest = _digest(key.strip())
        # Every key is compared, whichever matches, so that the time taken says nothing.
        matches = [hmac.compare_digest(digest, known) for known in self._key_digests]
        if scheme.lower() != b"bearer" or not any(matches):
            return None
        return self._tenants[matches.index(True)]

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
                    f"The server received no data of the request's body for {BODY_SILENCE_SECONDS:g} seconds."
                ) from None
            is_whole = not message.get("more_body", False)
            received += len(message.get("body", b""))
            if received > self._max_body_bytes:
                raise self._too_large("more")
            return message

        return limited

    def _too_large(self, size: str) -> BodyTooLargeError:
        return BodyTooLargeError(
            f"The body is {size}; this server accepts at most {self._max_body_bytes} bytes (--max-body-bytes)."
        )


class DirectRoutes:
    """Middleware that calls some endpoints itself.

    They take a request and return a response; routing and dependency injection would find that out anew for each call,
    in a fifth of the processor time that a request costs. FastAPI knows the same functions under the same paths, for
    its documents and for everything that is not an exact match.

    Args:
        app: Answers all others.
        endpoints: By method and path.
        handlers: What answers exceptions of a kind; the first that fits. Others go on to the caller.
    """

    def __init__(
        self,
        app: ASGIApp,
        endpoints: Mapping[tuple[str, str], DirectHandler],
        handlers: Mapping[type[Exception], ExceptionHandler],
    ) -> None:
        self._app = app
        self._endpoints = endpoints
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (the ASGI entry point)."""
        endpoint = None
        if scope["type"] == "http":
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            endpoint = self._endpoints.get((scope["method"], path))
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        is_started = False

        async def noting(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            response = await endpoint(request)
            await response(scope, receive, noting)
        except Exception as exc:
            handler = next((self._handlers[kind] for kind in self._handlers if isinstance(exc, kind)), None)
            if handler is None or is_started:
                raise
            response = await handler(request, exc)
            await response(scope, receive, send)


class DirectSend:
    """Middleware around all others that notes the server's ``send`` as :data:`DIRECT_SEND`.

    Args:
        app: Answers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (the ASGI entry point)."""
        scope[DIRECT_SEND] = send
        await self._app(scope, receive, send)


def _count(scope: Scope, header: bytes) -> int:
    return sum(name == header for name, _ in scope["headers"])


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
