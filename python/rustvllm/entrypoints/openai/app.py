"""The FastAPI application: which endpoint is where."""

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from rustvllm import __version__
from rustvllm.entrypoints.openai import chat, completions, errors, health, models
from rustvllm.entrypoints.openai.middleware import FrontDoor
from rustvllm.entrypoints.openai.refusals import UNBUILT_ENDPOINTS
from rustvllm.entrypoints.openai.state import ServerState
from rustvllm.exceptions import InvalidRequestError, RustVLLMError


def build_app(state: ServerState) -> FastAPI:
    """The application that serves ``state``; it may be built, and answers, before the model is loaded."""
    docs = state.settings.enable_docs
    app = FastAPI(
        title="rustvllm",
        description="OpenAI-compatible server of rustvllm.",
        version=__version__,
        openapi_url="/openapi.json" if docs else None,
        docs_url="/docs" if docs else None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.server = state
    for module in (completions, chat, models, health):
        app.include_router(module.router)
    for method, path in UNBUILT_ENDPOINTS:
        app.add_api_route(path, _not_built, methods=[method], include_in_schema=False)
    for kind in (RustVLLMError, errors.ServerError, errors.ClientDisconnectedError):
        app.add_exception_handler(kind, errors.handle_exception)
    app.add_exception_handler(RequestValidationError, _handle_validation_error)
    app.add_exception_handler(HTTPException, errors.handle_http_exception)  # type: ignore[arg-type]
    app.add_exception_handler(Exception, errors.handle_unforeseen)
    app.add_middleware(FrontDoor, state=state)
    return app


async def _not_built(request: Request) -> Response:
    raise errors.NotSupportedYetError(
        f"The endpoint {request.method} {request.url.path[:256]} is not supported yet by this server."
    )


async def _handle_validation_error(request: Request, exc: Exception) -> Response:
    """FastAPI's own 422, for path and query parameters, as a 400."""
    return await errors.handle_exception(request, InvalidRequestError(str(exc)))
