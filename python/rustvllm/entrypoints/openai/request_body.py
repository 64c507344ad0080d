"""Reads the body of a request: JSON, an object, of the model's shape, or one clear 400."""

import asyncio
import json
import reprlib
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from rustvllm.entrypoints.openai.errors import BadRequestError, ClientDisconnectedError, UnsupportedEncodingError
from rustvllm.exceptions import InvalidRequestError

RequestModel = TypeVar("RequestModel", bound=BaseModel)

_OFF_LOOP_BYTES = 64 << 10
"""Bodies over this are parsed in a thread, so that other clients' streams go on meanwhile."""


async def read_request(request: Request, model: type[RequestModel]) -> RequestModel:
    """The body of ``request`` as ``model``.

    Raises:
        BadRequestError: Not JSON by its content type or by its content, or not an object.
        UnsupportedEncodingError: The body is compressed.
        InvalidRequestError: A field is missing or of the wrong type; ``param`` names it.
        ClientDisconnectedError: The client went away while sending.
    """
    content_type = request.headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    if not (
        media_type == "application/json" or (media_type.startswith("application/") and media_type.endswith("+json"))
    ):
        sent = f"got {content_type[:100]!r}" if content_type else "got none"
        raise BadRequestError(f"The Content-Type must be application/json, {sent}.")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        # Unpacked, a small body can be of any size.
        raise UnsupportedEncodingError(
            f"The Content-Encoding {encoding[:100]!r} is not supported; send the body as it is."
        )
    try:
        body = await request.body()
    except ClientDisconnect:
        raise ClientDisconnectedError from None
    if len(body) > _OFF_LOOP_BYTES:
        return await asyncio.to_thread(parse_request, body, model)
    return parse_request(body, model)


def parse_request(body: bytes, model: type[RequestModel]) -> RequestModel:
    """``body`` as ``model``; raises as :func:`read_request` does."""
    if not body.strip():
        raise BadRequestError("The body is empty; send a JSON object.")
    try:
        return model.model_validate_json(body)
    except ValidationError as exc:
        # from None: the cause would drag the whole body through tracebacks and logs.
        raise _as_request_error(exc) from None
    except RecursionError:
        raise BadRequestError("The body is nested too deeply.") from None


def _as_request_error(exc: ValidationError) -> Exception:
    first = exc.errors(include_url=False)[0]
    kind, location, value = first["type"], first["loc"], first.get("input")
    message = first["msg"].removeprefix("Value error, ")
    if kind == "json_invalid":
        return BadRequestError(f"The body is not valid JSON: {message.removeprefix('Invalid JSON: ')}.")
    if not location:
        return BadRequestError(f"The body must be a JSON object, got {_shorten(value)}.")
    path = _path(location)
    param = str(location[0])[:256]
    if kind == "missing":
        return InvalidRequestError(f"{path} is required.", param)
    if kind == "value_error":
        return InvalidRequestError(f"{path} {message}.", param)
    return InvalidRequestError(f"{path}: {message[:1].lower()}{message[1:]}, got {_shorten(value)}.", param)


def _path(location: tuple[int | str, ...]) -> str:
    """``messages[0].role`` from a pydantic location; the names of a union's branches are left out."""
    path = str(location[0])[:256]
    for step in location[1:]:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step.isidentifier() and step not in ("str", "int"):
            path += f".{step}"
    return path


def _shorten(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    shortener = reprlib.Repr()
    shortener.maxstring = shortener.maxother = 80
    shortener.maxlist = shortener.maxdict = 4
    shortener.maxlevel = 2
    return shortener.repr(value)
