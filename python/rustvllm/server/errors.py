"""What went wrong, as HTTP: each exception becomes a status and the body that clients parse (``error_bodies``).

An error that one guard alone raises is a subclass of
:class:`ServerError` in the guard's module; ``limited_protocol.py`` answers what is not HTTP before there is a request.
"""

import asyncio
import json
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rustvllm.exceptions import (
    EngineDeadError,
    GrammarsFullError,
    InvalidRequestError,
    QueueFullError,
    QueueTimeoutError,
    RequestFailedError,
)
from rustvllm.logger import init_logger
from rustvllm.server.error_bodies import error_object, is_of_anthropic, path_of

logger = init_logger(__name__)

_MAX_NAMES, _MAX_NAME_CHARACTERS = 4, 128
"""Most names of models in a message, and characters of each."""


class ServerError(Exception):
    """An error of the HTTP layer itself, with everything its answer needs.

    Attributes:
        status: HTTP status code.
        param: Name of the offending request field, or None.
        retry_after: Seconds after which trying again makes sense, or None.
    """

    status = HTTPStatus.INTERNAL_SERVER_ERROR

    def __init__(self, message: str, *, param: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after = retry_after


class BadRequestError(ServerError):
    """The request cannot be read as what the endpoint takes."""

    status = HTTPStatus.BAD_REQUEST


class BodyTooLargeError(ServerError):
    """The body is over the server's limit."""

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


class BodyTooSlowError(ServerError):
    """The client has stopped in the middle of its body."""

    status = HTTPStatus.REQUEST_TIMEOUT


class UnsupportedEncodingError(ServerError):
    """The body is compressed, which this server does not undo."""

    status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE


class UnknownModelError(ServerError):
    """The request names a model that this server does not serve."""

    status = HTTPStatus.NOT_FOUND

    def __init__(self, model: str, served: Sequence[str]) -> None:
        names = ", ".join(f"`{name[:_MAX_NAME_CHARACTERS]}`" for name in served[:_MAX_NAMES])
        more = f" and {len(served) - _MAX_NAMES} more (GET /v1/models)" if len(served) > _MAX_NAMES else ""
        super().__init__(
            f"The model `{model[:_MAX_NAME_CHARACTERS]}` does not exist. Served here: {names}{more}.", param="model"
        )


class ResponseNotFoundError(ServerError):
    """The request is about a response that was stored, and none is."""

    status = HTTPStatus.NOT_FOUND

    def __init__(self, response_id: str) -> None:
        super().__init__(
            f"There is no response {response_id[:_MAX_NAME_CHARACTERS]!r}: this server stores none. Keep what "
            "POST /v1/responses answers, and send its items as input.",
            param="response_id",
        )


class AdapterNotFoundError(ServerError):
    """There is no such adapter, or this server loads none over HTTP."""

    status = HTTPStatus.NOT_FOUND


class NotSupportedYetError(ServerError):
    """The endpoint exists in this API, but not in this server yet."""

    status = HTTPStatus.NOT_IMPLEMENTED


class UnavailableError(ServerError):
    """The server is loading, stopping or full."""

    status = HTTPStatus.SERVICE_UNAVAILABLE


class ClientDisconnectedError(Exception):
    """The client disconnected before it was answered."""


def describe(exc: BaseException) -> tuple[HTTPStatus, str, str | None, int | None]:
    """Status, message, param and retry-after (seconds) that answer an exception.

    An unforeseen exception answers as 500 with a message that says nothing of its text, which may hold paths or
    parts of other requests; the log has it in full.
    """
    match exc:
        case ServerError():
            return exc.status, str(exc), exc.param, exc.retry_after
        case InvalidRequestError():
            return HTTPStatus.BAD_REQUEST, str(exc), exc.param, None
        case QueueFullError() | QueueTimeoutError() | GrammarsFullError():
            return HTTPStatus.SERVICE_UNAVAILABLE, str(exc), None, exc.retry_after or 1
        case EngineDeadError():
            return HTTPStatus.INTERNAL_SERVER_ERROR, str(exc) or "The engine has stopped.", None, None
        case RequestFailedError():
            return HTTPStatus.INTERNAL_SERVER_ERROR, str(exc), None, None
        case _:
            return (
                HTTPStatus.INTERNAL_SERVER_ERROR,
                "Internal server error; the server's log has the details.",
                None,
                None,
            )


_FORESEEN = (
    ServerError,
    InvalidRequestError,
    QueueFullError,
    QueueTimeoutError,
    GrammarsFullError,
    EngineDeadError,
    RequestFailedError,
)


_ALL_PATHS_ARE_GUARDED = (
    "Unauthorized: the API key guards every path of this server, not /v1 alone; "
    "send it as 'Authorization: Bearer KEY', or start the server with --api-key-exempt and the path"
)


def is_foreseen(exc: BaseException) -> bool:
    """Whether the exception is one that :func:`describe` knows by name, and so needs no traceback in the log."""
    return isinstance(exc, _FORESEEN)


def error_body(exc: BaseException, path: str) -> dict[str, Any]:
    """The JSON object that answers an exception, also inside a stream.

    Args:
        exc: What was raised.
        path: Of the request, below the server's root.
    """
    status, message, param, _ = describe(exc)
    return error_object(path, status, message, param)


def error_response(exc: BaseException, path: str) -> JSONResponse:
    """The whole response that answers an exception; the arguments are those of :func:`error_body`."""
    status, message, param, retry_after = describe(exc)
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    return JSONResponse(error_object(path, status, message, param), status_code=status, headers=headers)


def unauthorized_response(path: str) -> JSONResponse:
    """The answer to a missing or wrong API key; below ``/v1`` it has the short form of the API we follow.

    Other paths are open in vLLM, so there the answer says that here they are not, and what opens them.
    """
    if is_of_anthropic(path):
        message = "Unauthorized: send the API key as 'x-api-key: KEY' or 'Authorization: Bearer KEY'."
        body = error_object(path, HTTPStatus.UNAUTHORIZED, message, None)
    else:
        body = {"error": "Unauthorized" if path.startswith("/v1/") else _ALL_PATHS_ARE_GUARDED}
    return JSONResponse(
        body,
        status_code=HTTPStatus.UNAUTHORIZED,
        headers={"WWW-Authenticate": "Bearer"},
    )


def status_response(ok: bool, content: dict[str, Any]) -> JSONResponse:
    """A health answer: 200 when ``ok``, else 503."""
    if ok:
        return JSONResponse(content)
    return JSONResponse(content, status_code=HTTPStatus.SERVICE_UNAVAILABLE, headers={"Retry-After": "1"})


async def handle_exception(request: Request, exc: Exception) -> Response:
    """FastAPI's handler for everything an endpoint raises on purpose."""
    if isinstance(exc, ClientDisconnectedError):
        # No client reads this status; 499 is what proxies write in their logs for it.
        return Response(status_code=499)
    status, message, _, _ = describe(exc)
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR and status != HTTPStatus.NOT_IMPLEMENTED:
        logger.warning("%s %s answered %d: %s", request.method, request.url.path, status, message)
    return error_response(exc, path_of(request.scope))


async def handle_unforeseen(request: Request, exc: Exception) -> Response:
    """The handler of last resort; the ASGI server logs the traceback when the exception reaches it after this."""
    logger.error("%s %s failed: %s: %s", request.method, request.url.path, type(exc).__name__, exc)
    return error_response(exc, path_of(request.scope))


async def handle_http_exception(request: Request, exc: HTTPException) -> Response:
    """Routing errors (unknown path, wrong method) in OpenAI's shape."""
    status = HTTPStatus(exc.status_code)
    if status == HTTPStatus.NOT_FOUND:
        message = f"There is no endpoint {request.method[:32]} {request.url.path[:256]}. " + (
            "Of Anthropic's API this server has POST /v1/messages and POST /v1/messages/count_tokens."
            if is_of_anthropic(path_of(request.scope))
            else "The API is OpenAI's, with paths such as /v1/chat/completions."
        )
    elif status == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (exc.headers or {}).get("Allow", "another method")
        message = f"{request.url.path[:256]} does not accept {request.method[:32]}; use {allowed}."
    else:
        message = exc.detail
    body = error_object(path_of(request.scope), status, message, None)
    return JSONResponse(body, status_code=status, headers=exc.headers)


def error_event(exc: BaseException, path: str) -> bytes:
    """An error as one server-sent event: in a stream the status line has already gone out as 200."""
    return b"data: " + json.dumps(error_body(exc, path), ensure_ascii=False).encode() + b"\n\n"


def log_stream_error(exc: BaseException, request_id: str) -> None:
    """Note in the log that a stream ended with an error."""
    if is_foreseen(exc):
        logger.warning("stream %s ended with an error: %s", request_id, exc)
    elif not isinstance(exc, asyncio.CancelledError):
        logger.error("stream %s failed", request_id, exc_info=exc)
