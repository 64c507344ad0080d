"""The endpoints of the live page: the page, the state of the engines, the last hour, the journey of a request."""

from collections.abc import AsyncGenerator
from typing import Final

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from rustvllm.server.dashboard.access import check_access
from rustvllm.server.dashboard.journey_stream import journey_events
from rustvllm.server.dashboard.page import DATA_HEADERS, page
from rustvllm.server.dashboard.seats import Seats
from rustvllm.server.dashboard.state_feed import StateFeed
from rustvllm.server.errors import BadRequestError
from rustvllm.server.state import ServedModel, ServerState

MAX_JOURNEYS: Final = 8
"""Journeys that are watched at the same time, of one API process: an engine has room for those of two."""
_MAX_ID_CHARS: Final = 256
_MAX_DIGITS: Final = 15


async def dashboard(request: Request) -> Response:
    """The page; it has no data, so it needs no key and is there before the model is."""
    check_access(request, _state(request).settings.dashboard)
    html, headers = page()
    return HTMLResponse(html, headers=headers)


async def dashboard_with_a_slash(request: Request) -> Response:
    """The page's address relative to this one, so that a proxy's path in front of it stays."""
    check_access(request, _state(request).settings.dashboard)
    return RedirectResponse("../dashboard")


async def events(request: Request) -> Response:
    """The state of all engines, again and again."""
    state = _state(request)
    check_access(request, state.settings.dashboard)
    feed: StateFeed = request.app.state.dashboard_feed
    feed.seats.take()
    return _EventStream(feed.watch(), feed.seats)


async def history(request: Request) -> Response:
    """The last hour, a point for every 15 seconds; ``since`` leaves out those up to that number."""
    check_access(request, _state(request).settings.dashboard)
    text = request.query_params.get("since", "0")
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise BadRequestError(f"since must be the number of a data point, got {text[:80]!r}.", param="since")
    feed: StateFeed = request.app.state.dashboard_feed
    return Response(feed.history.as_json(int(text)), media_type="application/json", headers=DATA_HEADERS)


async def journey(request: Request) -> Response:
    """What happens to the request whose id begins so, from now on."""
    state = _state(request)
    check_access(request, state.settings.dashboard)
    request_id = request.query_params.get("request_id", "")
    if not 0 < len(request_id) <= _MAX_ID_CHARS or not request_id.isprintable():
        raise BadRequestError(
            f"request_id must have 1 to {_MAX_ID_CHARS} printable characters, got {len(request_id)}.",
            param="request_id",
        )
    seats: Seats = request.app.state.journey_seats
    seats.take()
    return _EventStream(_journey_events(state.model, request_id), seats)


def journey_seats() -> Seats:
    """The seats of those who watch journeys."""
    return Seats(MAX_JOURNEYS, f"At most {MAX_JOURNEYS} journeys can be watched at once; try again later.")


def _journey_events(model: ServedModel, request_id: str) -> AsyncGenerator[bytes, None]:

    def text_of(token_id: int) -> str:
        return "" if model.tokenizer is None else str(model.tokenizer.decode([token_id], skip_special_tokens=False))

    return journey_events(model.engine, request_id, text_of)


def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


class _EventStream(StreamingResponse):
    """Events until they end or the reader goes, which ends them at once and gives the reader's seat back."""

    def __init__(self, events: AsyncGenerator[bytes, None], seats: Seats) -> None:
        super().__init__(events, media_type="text/event-stream", headers=DATA_HEADERS)
        self._events, self._seats = events, seats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the stream (the ASGI entry point)."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._seats.leave()
            await self._events.aclose()
