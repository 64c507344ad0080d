"""What an error's body looks like: OpenAI's shape, and that of Anthropic's API below its paths."""

from http import HTTPStatus
from typing import Any, Final

from starlette.types import Scope

MESSAGES_PATH: Final = "/v1/messages"
"""Below it, clients speak Anthropic's API."""
_MAX_MESSAGE_CHARACTERS = 1024
_OPENAI_TYPES = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.UNAUTHORIZED: "AuthenticationError",
    HTTPStatus.FORBIDDEN: "PermissionDeniedError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.METHOD_NOT_ALLOWED: "MethodNotAllowedError",
    HTTPStatus.REQUEST_TIMEOUT: "RequestTimeoutError",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "BadRequestError",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "BadRequestError",
    HTTPStatus.UNPROCESSABLE_ENTITY: "UnprocessableEntityError",
    HTTPStatus.INTERNAL_SERVER_ERROR: "InternalServerError",
    HTTPStatus.NOT_IMPLEMENTED: "NotImplementedError",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailableError",
}
_ANTHROPIC_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}


def path_of(scope: Scope) -> str:
    """The path of a request below the server's root."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def is_of_anthropic(path: str) -> bool:
    """Whether clients of this path speak Anthropic's API."""
    return path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/")


def error_object(path: str, status: HTTPStatus, message: str, param: str | None) -> dict[str, Any]:
    """The body that answers a request at a path.

    Args:
        path: Below the server's root.
        status: Of the answer.
        message: For the client; what is over 1,024 characters is cut off.
        param: The field that is wrong; None: no single one.
    """
    if len(message) > _MAX_MESSAGE_CHARACTERS:  # it may repeat a number of thousands of digits
        message = message[:_MAX_MESSAGE_CHARACTERS] + "…"
    is_server_error = status >= HTTPStatus.INTERNAL_SERVER_ERROR
    if is_of_anthropic(path):
        kind = _ANTHROPIC_TYPES.get(status, "api_error" if is_server_error else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    kind = _OPENAI_TYPES.get(status, "InternalServerError" if is_server_error else "BadRequestError")
    return {"error": {"message": message, "type": kind, "param": param, "code": int(status)}}
