""":class:`DirectRoutes`: the endpoints that every token's time depends on, called without the framework's dispatch.

They take a request and return a response; routing and dependency injection would find that out anew for each call, in a
fifth of the processor time that a request costs. FastAPI knows the same functions under the same paths, for its
documents and for everything that is not an exact match.
"""

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

Endpoint = Callable[[Request], Awaitable[Response]]
ExceptionHandler = Callable[[Request, Exception], Awaitable[Response]]


class DirectRoutes:
    """Middleware that answers some requests itself.

    Args:
        app: Answers all others.
        endpoints: By method and path.
        handlers: What answers exceptions of a kind; the first that fits. Others go on to the caller.
    """

    def __init__(
        self,
        app: ASGIApp,
        endpoints: Mapping[tuple[str, str], Endpoint],
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
