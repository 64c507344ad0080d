""":class:`CrossOrigin`: what pages of other origins may do, decided before a key is asked for.

A preflight carries no key, and a page cannot use an error that it may not read; so this layer is around all others.
"""

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from rustvllm.server.flags.http_settings import CorsSettings
from rustvllm.server.http.front_door import is_own_page

_EXPOSED = ("X-Request-Id", "Retry-After")


class CrossOrigin:
    """Starlette's CORS middleware for the API.

    Nothing for the server's own pages: they show the requests of all clients, whatever other origins may do elsewhere.
    """

    def __init__(self, app: ASGIApp, settings: CorsSettings) -> None:
        self._app = app
        # What depends on the origin has to say so to caches even where there is none.
        self._always = settings.credentials or "*" not in settings.origins
        self._with_cors = CORSMiddleware(
            app,
            allow_origins=settings.origins,
            allow_methods=settings.methods,
            allow_headers=settings.headers,
            allow_credentials=settings.credentials,
            expose_headers=_EXPOSED,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (the ASGI entry point)."""
        if scope["type"] == "http" and (self._always or _has_origin(scope)) and not is_own_page(scope):
            await self._with_cors(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _has_origin(scope: Scope) -> bool:
    return any(name == b"origin" for name, _ in scope["headers"])
