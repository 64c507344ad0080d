"""Who may see the live page: where it is on at all, its own page and no other that a browser has open.

Under which names of the server it is shown is :class:`HostCheck`'s to decide, before a request comes here.
"""

from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.requests import Request

from rustvllm.server.errors import ServerError
from rustvllm.server.flags.dashboard_args import DashboardAccess


class DashboardOffError(ServerError):
    """There is no live page here."""

    status = HTTPStatus.NOT_FOUND


class DashboardForbiddenError(ServerError):
    """Not for the page that asks."""

    status = HTTPStatus.FORBIDDEN


def check_access(request: Request, access: DashboardAccess) -> None:
    """Refuse a request that may not see the live page; the key is the front door's to ask for.

    Raises:
        DashboardOffError: The page is off.
        DashboardForbiddenError: Another page asks.
    """
    if access == "off":
        raise DashboardOffError("The live page is off (--disable-dashboard).")
    if access == "remote":
        raise DashboardOffError(
            "The live page is off because this server is reachable from other machines; start it with "
            "--enable-dashboard to serve the page anyway (and with --api-key: every viewer of the page sees every "
            "request)."
        )
    origin = request.headers.get("origin")
    if origin is not None and _host_of(origin) != request.headers.get("host", ""):
        raise DashboardForbiddenError(
            f"Only the live page itself may call this endpoint, not a page of {origin[:128]!r}."
        )


def _host_of(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc
    except ValueError:  # brackets without an end
        return None
