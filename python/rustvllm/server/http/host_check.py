""":class:`HostCheck`: under which names the server answers, decided before anything else sees a request.

A page elsewhere can let a name of its own point at this machine, and is then, for the browser that shows it, of one
origin with this server: it may send what it likes and read the answers. What gives it away is the ``Host`` it asks for.
"""

from http import HTTPStatus

from starlette.types import ASGIApp, Receive, Scope, Send

from rustvllm.server.errors import BadRequestError, ServerError, error_response
from rustvllm.server.flags.host_names import host_name, is_among, is_loopback

OWN_PAGES = "/dashboard"
"""The server's own pages are at this path and below it."""
_MAX_SHOWN_CHARACTERS = 128
_MAX_REMEMBERED = 64
"""Headers that named the loopback: a server sees the same one with almost every request."""


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
                await error_response(refusal)(scope, receive, send)
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
                "with --allowed-hosts and the names that it has (--allowed-hosts '*': any)."
            )
        if self._local_pages and is_own_page(scope):
            return UnknownHostError(
                f"The live page is for this machine, which is not called {shown}; open it under localhost or "
                "127.0.0.1, or start the server with --enable-dashboard to have it under any name that the server "
                "answers to (--allowed-hosts)."
            )
        return None


def is_own_page(scope: Scope) -> bool:
    """Whether a request is for one of the server's own pages."""
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    return bool(path == OWN_PAGES or path.startswith(OWN_PAGES + "/"))
