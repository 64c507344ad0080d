"""What the models say of a wrong field, as the error that the client gets: its path, its value and what it must be."""

import json
import reprlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from rustvllm.exceptions import InvalidRequestError
from rustvllm.server.schemas.refusals import EMBEDDING_REFUSALS
from rustvllm.server.schemas.responses_request import ResponsesRequest

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_MUST_BE = "Input should be "
_TOO_LONG_AN_INTEGER = f"{_MUST_BE}a valid integer of at most 64 bits"
_PART = '; a part is an object such as {"type": "text", "text": "Hello"}'


def field_error(exc: ValidationError, within: tuple[int | str, ...] = ()) -> InvalidRequestError:
    """The error of a request with a wrong field; ``param`` names the outermost.

    Args:
        exc: What pydantic says; all of it is about fields.
        within: Where in the request the model is that says so.
    """
    first, message = _closest(exc.errors(include_url=False))
    kind, location, value = first["type"], (*within, *first["loc"]), first.get("input")
    path, param = _path(location), str(location[0])[:256]
    if kind == "too_long":
        limits = first["ctx"]
        count, most = limits["actual_length"], limits["max_length"]
        given = f"more than {most}" if count is None else count
        return InvalidRequestError(f"{path} has {given} entries; the limit is {most}: send fewer.", param)
    if kind == "missing" and param == "prompt" and isinstance(value, dict) and value.get("prompt_embeds"):
        return InvalidRequestError(
            "prompt_embeds is not supported yet; send text or token ids as prompt.", "prompt_embeds"
        )
    if kind == "missing" and param == "input" and isinstance(value, dict) and value.get("messages"):
        if exc.title == ResponsesRequest.__name__:
            return InvalidRequestError("messages is a field of chat completions; a response has input.", "messages")
        _, instead = EMBEDDING_REFUSALS["messages"]
        return InvalidRequestError(f"messages is not supported yet; {instead}.", "messages")
    if kind == "missing":
        return InvalidRequestError(f"{path} is required.", param)
    if kind == "value_error":
        return InvalidRequestError(f"{path} {message.removeprefix('Value error, ')}.", param)
    hint = _PART if "content" in location else ""
    return InvalidRequestError(f"{path}: {message[:1].lower()}{message[1:]}, got {shortened(value)}{hint}.", param)


def shortened(value: Any) -> str:
    """A value of a request, short enough for a message."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    shortener = reprlib.Repr()
    shortener.maxstring = shortener.maxother = 80
    shortener.maxlist = shortener.maxdict = 4
    shortener.maxlevel = 2
    return shortener.repr(value)


def _closest(errors: "Sequence[ErrorDetails]") -> "tuple[ErrorDetails, str]":
    """Of the errors of a field that may have several shapes, the one of the shape that was meant, and its message.

    That a list is too long is what the client needs to know first. Else it is the error deepest within the value; where
    none of the shapes came further than the others, the message names them all.
    """
    too_long = next((error for error in errors if error["type"] == "too_long"), None)
    if too_long is not None:
        return too_long, too_long["msg"]
    field = _path(errors[0]["loc"])
    deepest = max(
        (error for error in errors if _path(error["loc"]).startswith((f"{field}[", f"{field}."))),
        key=lambda error: len(error["loc"]),
        default=errors[0],
    )
    where = _path(deepest["loc"])
    said = list(dict.fromkeys(_said(error) for error in errors if _path(error["loc"]) == where))
    if all(message.startswith(_MUST_BE) for message in said):
        return deepest, _MUST_BE + " or ".join(message.removeprefix(_MUST_BE) for message in said)
    return deepest, _said(deepest)


def _said(error: "ErrorDetails") -> str:
    """The message of one error; of a number such as 1e30, too, which pydantic takes for a text that it cannot read."""
    return _TOO_LONG_AN_INTEGER if error["type"] == "int_parsing_size" else error["msg"]


def _path(location: tuple[int | str, ...]) -> str:
    """``messages[0].role`` from a pydantic location; the names of a union's branches are left out."""
    path = str(location[0])[:256]
    for step in location[1:]:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step.isidentifier() and step not in ("str", "int"):
            path += f".{step}"
    return path
