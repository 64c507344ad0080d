"""``GET /``: where a person and where a program go from here; ``GET /docs``: what every endpoint takes and answers."""

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

from rustvllm import __version__

if TYPE_CHECKING:
    from rustvllm.server.state import ServerState

MAX_HEADER_CHARS = 4096


async def front_page(request: Request) -> Response:
    """A browser is led to the live page, or where that is off to the documents; others get a list of the paths.

    The address is relative to this one, so that a proxy's path in front of it stays.
    """
    state: ServerState = request.app.state.server
    paths = {"api": "v1", "models": "v1/models", "health": "health", "metrics": "metrics"}
    if state.settings.enable_docs:
        paths["docs"] = "docs"
    if state.settings.has_dashboard:
        paths["page"] = "dashboard"
    for_people = paths.get("page", paths.get("docs"))
    if for_people is not None and "text/html" in request.headers.get("accept", "")[:MAX_HEADER_CHARS]:
        return RedirectResponse(for_people)
    return JSONResponse({"server": "rustvllm", "version": __version__, **paths})


async def redoc() -> Response:
    """Where others have a second page of documents: the one there is."""
    return RedirectResponse("docs")


def docs(request: Request) -> Response:
    """The documents as a page that needs neither scripts nor a network; made in a thread, once."""
    page = getattr(request.app.state, "docs_page", None)
    if page is None:
        from rustvllm.server.schemas.docs_page import docs_page

        page = request.app.state.docs_page = docs_page(request.app.openapi())
    html, headers = page
    return HTMLResponse(html, headers=headers)
