"""The FastAPI application: which endpoint is where."""

from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rustvllm import __version__
from rustvllm.config import TracingConfig
from rustvllm.entrypoints.openai import chat, completions, errors, health, metrics, models, tokenization
from rustvllm.entrypoints.openai.access_log import AccessLog
from rustvllm.entrypoints.openai.cross_origin import CrossOrigin
from rustvllm.entrypoints.openai.custom_middleware import add_custom_middleware
from rustvllm.entrypoints.openai.dashboard import routes as dashboard
from rustvllm.entrypoints.openai.dashboard.state_feed import StateFeed
from rustvllm.entrypoints.openai.direct_routes import DirectRoutes
from rustvllm.entrypoints.openai.http_trace import HttpTrace
from rustvllm.entrypoints.openai.middleware import FrontDoor
from rustvllm.entrypoints.openai.refusals import UNBUILT_ENDPOINTS
from rustvllm.entrypoints.openai.request_ids import RequestIds
from rustvllm.entrypoints.openai.settings import ServerSettings
from rustvllm.entrypoints.openai.sse import DIRECT_SEND
from rustvllm.entrypoints.openai.state import ServerState
from rustvllm.exceptions import InvalidRequestError, RustVLLMError

_DIRECT_ENDPOINTS = {
    ("POST", "/v1/completions"): completions.create_completion,
    ("POST", "/v1/chat/completions"): chat.create_chat_completion,
    ("GET", "/health"): health.health,
}
_FORESEEN = (RustVLLMError, errors.ServerError, errors.ClientDisconnectedError)


class _Application(FastAPI):
    """FastAPI that lets a stream write to the server itself (see :data:`DIRECT_SEND`) and knows its own document.

    What every answer needs, those to exceptions included, stands around FastAPI's own layers.
    """

    def __init__(self, settings: ServerSettings, **options: Any) -> None:
        super().__init__(**options)
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._settings.http.middleware:
            scope[DIRECT_SEND] = send
        await super().__call__(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document, made when it is first asked for."""
        if self.openapi_schema is None:
            from rustvllm.entrypoints.openai.openapi import document

            self.openapi_schema = document(self, needs_key=bool(self._settings.api_keys))
        return self.openapi_schema

    def build_middleware_stack(self) -> ASGIApp:
        http, stack = self._settings.http, super().build_middleware_stack()
        if http.cors.origins:
            stack = CrossOrigin(stack, http.cors)
        if http.request_id_headers or self._settings.enable_access_log:
            stack = RequestIds(stack, show=http.request_id_headers)
        if self._settings.enable_access_log:
            stack = AccessLog(stack, http.quiet_paths)
        return stack


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
        docs_url="/docs" if docs else None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.server = state
    app.state.dashboard_feed = StateFeed(state)
    app.state.num_journeys = 0
    for module in (completions, chat, models, tokenization, health, metrics, dashboard):
        app.include_router(module.router)
    for method, path in UNBUILT_ENDPOINTS:
        app.add_api_route(path, _not_built, methods=[method], include_in_schema=False)
    for kind in _FORESEEN:
        app.add_exception_handler(kind, errors.handle_exception)
    app.add_exception_handler(RequestValidationError, _handle_validation_error)
    app.add_exception_handler(HTTPException, errors.handle_http_exception)  # type: ignore[arg-type]
    app.add_exception_handler(Exception, errors.handle_unforeseen)
    # What is added last comes first.
    app.add_middleware(
        DirectRoutes, endpoints=_DIRECT_ENDPOINTS, handlers=dict.fromkeys(_FORESEEN, errors.handle_exception)
    )
    app.add_middleware(FrontDoor, state=state)
    if state.settings.tracing != TracingConfig():
        app.add_middleware(HttpTrace, state=state)
    add_custom_middleware(app, state.settings.http.middleware)
    return app


async def _not_built(request: Request) -> Response:
    raise errors.NotSupportedYetError(
        f"The endpoint {request.method} {request.url.path[:256]} is not supported yet by this server."
    )


async def _handle_validation_error(request: Request, exc: Exception) -> Response:
    """FastAPI's own 422, for path and query parameters, as a 400."""
    return await errors.handle_exception(request, InvalidRequestError(str(exc)))
