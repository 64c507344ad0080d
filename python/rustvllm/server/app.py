"""The FastAPI application: the endpoints of the table, and the layers around them."""

from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from rustvllm import __version__
from rustvllm.exceptions import InvalidRequestError, RustVLLMError
from rustvllm.server import errors
from rustvllm.server.dashboard.routes import journey_seats
from rustvllm.server.dashboard.state_feed import StateFeed
from rustvllm.server.endpoint_table import ENDPOINTS, UNBUILT_ENDPOINTS
from rustvllm.server.endpoints import front_page
from rustvllm.server.flags.settings import ServerSettings
from rustvllm.server.http.access_log import AccessLog
from rustvllm.server.http.cross_origin import CrossOrigin
from rustvllm.server.http.custom_middleware import add_custom_middleware
from rustvllm.server.http.front_door import DirectRoutes, DirectSend, FrontDoor, HostCheck
from rustvllm.server.http.http_trace import HttpTrace
from rustvllm.server.http.request_ids import RequestIds
from rustvllm.server.state import ServerState

_FORESEEN = (RustVLLMError, errors.ServerError, errors.ClientDisconnectedError)


class _Application(FastAPI):
    """FastAPI with the layers that every answer needs, those to exceptions included, around its own."""

    def __init__(self, settings: ServerSettings, **options: Any) -> None:
        super().__init__(**options)
        self._settings = settings

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document, made when it is first asked for."""
        if self.openapi_schema is None:
            from rustvllm.server.schemas.openapi import document

            self.openapi_schema = document(self, ENDPOINTS, needs_key=bool(self._settings.api_keys))
        return self.openapi_schema

    def build_middleware_stack(self) -> ASGIApp:
        http, stack = self._settings.http, super().build_middleware_stack()
        if http.cors.origins:
            stack = CrossOrigin(stack, http.cors)
        # Around all that answers; what follows only takes notes.
        stack = HostCheck(stack, http.allowed_hosts, local_pages=self._settings.dashboard == "local")
        if http.request_id_headers or self._settings.enable_access_log:
            stack = RequestIds(stack, show=http.request_id_headers)
        if self._settings.enable_access_log:
            stack = AccessLog(stack, http.quiet_paths)
        return stack if http.middleware else DirectSend(stack)


def build_app(state: ServerState) -> FastAPI:
    """The application that serves ``state``; it may be built, and answers, before the model is loaded.

    Raises:
        ConfigError: A middleware of the user's cannot be used.
    """
    docs = state.settings.enable_docs
    app = _Application(
        state.settings,
        title="rustvllm",
        description="OpenAI-compatible server of rustvllm.",
        version=__version__,
        openapi_url="/openapi.json" if docs else None,
        docs_url=None,  # its page fetches scripts from elsewhere
        redoc_url=None,
        redirect_slashes=True,
    )
    app.state.server = state
    app.state.dashboard_feed = StateFeed(state)
    app.state.journey_seats = journey_seats()
    for row in (*ENDPOINTS, *UNBUILT_ENDPOINTS):
        app.add_api_route(row.path, row.handler, methods=[row.method], include_in_schema=row.is_documented)
        if row.method == "GET" and not row.is_watching:  # monitors probe with HEAD; uvicorn leaves the body out
            app.add_api_route(row.path, row.handler, methods=["HEAD"], include_in_schema=False)
    if docs:
        app.add_api_route("/docs", front_page.docs, methods=["GET", "HEAD"], include_in_schema=False)
        app.add_api_route("/redoc", front_page.redoc, methods=["GET", "HEAD"], include_in_schema=False)
    for kind in _FORESEEN:
        app.add_exception_handler(kind, errors.handle_exception)
    app.add_exception_handler(RequestValidationError, _handle_validation_error)
    app.add_exception_handler(HTTPException, errors.handle_http_exception)  # type: ignore[arg-type]
    app.add_exception_handler(Exception, errors.handle_unforeseen)
    # What is added last comes first.
    app.add_middleware(
        DirectRoutes,
        endpoints={(row.method, row.path): row.handler for row in ENDPOINTS if row.is_direct},
        handlers=dict.fromkeys(_FORESEEN, errors.handle_exception),
    )
    app.add_middleware(FrontDoor, state=state, endpoints=ENDPOINTS)
    if state.is_traced:
        app.add_middleware(HttpTrace, state=state)
    add_custom_middleware(app, state.settings.http.middleware)
    return app


async def _handle_validation_error(request: Request, exc: Exception) -> Response:
    """FastAPI's own 422, for path and query parameters, as a 400."""
    return await errors.handle_exception(request, InvalidRequestError(str(exc)))
