"""Who may see the live page: by default browsers on this machine, and no other page that they have open.

A page elsewhere can make a browser ask this server, under a name of its own that it lets point here. What such a page
could learn is refused by the ``Host`` it asks for and by the ``Origin`` that it has.
"""

from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.requests import Request

from rustvllm.entrypoints.openai.dashboard.exposure import DashboardAccess, is_loopback
from rustvllm.entrypoints.openai.errors import ServerError


class DashboardOffError(ServerError):
    """There is no live page here."""

    status = HTTPStatus.NOT_FOUND


class DashboardForbiddenError(ServerError):
    """Not for this page or under this name."""

    status = HTTPStatus.FORBIDDEN


def check_access(request: Request, access: DashboardAccess) -> None:
    """Refuse a request that may not see the live page; the key is the front door's to ask for.

    Raises:
        DashboardOffError: The page is off.
        DashboardForbiddenError: Another page asks, or the server is called by a name that is not this machine's.
    """
    if access == "off":
        raise DashboardOffError("The live page is off (--disable-dashboard).")
    if access == "remote":
        raise DashboardOffError(
            "The live page is off because this server listens for other machines too; start it with --enable-dashboard "
            "to have it all the same (and with --api-key: whoever reaches the page sees every request)."
        )
    host = request.headers.get("host", "")
    if access == "local" and not is_local(host):
        raise DashboardForbiddenError(
            f"The live page is for this machine, which is not called {host[:128]!r}; open it under localhost or "
            "127.0.0.1, or start the server with --enable-dashboard to have it under any name."
        )
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != host:
        raise DashboardForbiddenError(f"The live page answers to itself alone, not to a page of {origin[:128]!r}.")


def is_local(host: str) -> bool:
    """Whether a ``Host`` header, with or without a port, names this machine from within."""
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    return name is not None and is_loopback(name)
