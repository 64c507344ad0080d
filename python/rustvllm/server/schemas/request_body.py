"""Reads the body of a request: JSON, an object, of the model's shape, or one clear 400.

How long anything takes that is done with a body depends on its size: what :func:`at_size` does with a small one happens
on the event loop, and with a large one in a thread.
"""

import asyncio
import codecs
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from rustvllm.exceptions import InvalidRequestError
from rustvllm.logger import init_logger
from rustvllm.sampling_params import MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from rustvllm.sampling_params.table import SAMPLING_LISTS
from rustvllm.server.errors import BadRequestError, ClientDisconnectedError, UnsupportedEncodingError
from rustvllm.server.schemas.field_errors import field_error, shortened
from rustvllm.server.schemas.protocol import MAX_CONTAINERS, MAX_FREE_VALUES, MAX_IDS
from rustvllm.server.schemas.refusals import Refusals
from rustvllm.text.body_values import MAX_COUNTED_FIELDS, FieldValues, count_body_values

logger = init_logger(__name__)

RequestModel = TypeVar("RequestModel", bound=BaseModel)
T = TypeVar("T")

OFF_LOOP_BYTES = 8 << 10
"""What bodies over this hold is looked at in a thread, so that other clients' streams go on meanwhile: in one of this
size some thousand numbers have room."""
_PARSE_OFF_LOOP_BYTES = 64 << 10
_MAX_NAMES_LOGGED = 256
_logged_names: set[str] = set()
_BODY_SIZE = "rustvllm.body_size"
_MAX_ITEMS = {
    **dict.fromkeys(("prompt", "input", "tokens"), MAX_IDS),
    **dict.fromkeys(("stop", "stop_sequences"), MAX_STOP_STRINGS),
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    **{name: row.max_entries for name, row in SAMPLING_LISTS.items()},
}
"""Fields with limits of their own: most entries, at any depth."""
_MAPS = frozenset(name for name, row in SAMPLING_LISTS.items() if row.kind == "biases")
_parser = ThreadPoolExecutor(1, "body-parser")
"""Parses large bodies one at a time: each holds the interpreter to its end, and others get their turn between two."""


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
            f"The Content-Encoding {encoding[:100]!r} is not supported; send the body uncompressed."
        )
    try:
        body = await request.body()
    except ClientDisconnect:
        raise ClientDisconnectedError from None
    request.scope[_BODY_SIZE] = len(body)
    if len(body) > _PARSE_OFF_LOOP_BYTES:
        return await asyncio.get_running_loop().run_in_executor(_parser, parse_request, body, model)
    return parse_request(body, model)


async def at_size(request: Request, work: Callable[[], T]) -> T:
    """The result of ``work``, which looks at all of the body of ``request``: here, or in a thread if that is large.

    Raises:
        Exception: What ``work`` raises.
    """
    return await asyncio.to_thread(work) if is_large(request) else work()


def is_large(request: Request) -> bool:
    """Whether the body, which was read, is so large that looking at all of it would hold up the event loop."""
    size: int = request.scope[_BODY_SIZE]
    return size > OFF_LOOP_BYTES


def parse_request(body: bytes, model: type[RequestModel]) -> RequestModel:
    """``body`` as ``model``; raises as :func:`read_request` does."""
    body = body.removeprefix(codecs.BOM_UTF8)  # some editors put it before a file's text
    if not body.strip():
        raise BadRequestError("The body is empty; send a JSON object.")
    if len(body) > 2 * MAX_FREE_VALUES:  # a value takes two characters at least
        fields = count_body_values(body)
        _check_num_containers(fields)
        _check_num_values(fields)
    try:
        return _validated(body, model)
    except ValidationError as exc:
        # from None: the cause would drag the whole body through tracebacks and logs.
        raise _as_request_error(exc) from None
    except RecursionError:
        raise BadRequestError("The body is nested too deeply.") from None


def _validated(body: bytes, model: type[RequestModel]) -> RequestModel:
    """``body`` as ``model``, with deeper values in fields that the model does not know than its parser reads."""
    try:
        return model.model_validate_json(body)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        if first["type"] != "json_invalid" or "recursion limit" not in first["msg"]:
            raise
        problem = exc
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):  # too deep for this one, too, or wrong behind what is deep
        raise problem from None
    if not isinstance(fields, dict):
        raise problem
    # Nothing reads what such a field holds; that it asks for something still counts.
    shallow = {name: value if name in model.model_fields else bool(value) for name, value in fields.items()}
    return model.model_validate_json(json.dumps(shallow))


def refuse_unbuilt(request: BaseModel, refusals: Refusals) -> None:
    """Raise for a field of ``request`` that asks for something not built yet, and log the fields that are ignored.

    Args:
        request: A parsed request; fields unknown to its model count too.
        refusals: One of the tables above.

    Raises:
        InvalidRequestError: With ``param`` naming the field.
    """
    for name in sorted(request.model_fields_set & refusals.keys()):
        asks_nothing, instead = refusals[name]
        if not asks_nothing(getattr(request, name)):
            hint = f"; {instead}" if instead else ""
            raise InvalidRequestError(f"{name} is not supported yet{hint}.", name)
    for name in request.model_extra or ():
        if name not in refusals and name not in _logged_names and len(_logged_names) < _MAX_NAMES_LOGGED:
            _logged_names.add(name)
            logger.warning("ignoring the unknown request field %.64r (logged once)", name)


def _check_num_containers(fields: list[FieldValues]) -> None:
    """Refuse a body that is mostly brackets: each costs a hundred times what its two characters do."""
    count = 1 + sum(field.num_objects + field.num_lists for field in fields)
    if count > MAX_CONTAINERS:
        raise BadRequestError(
            f"The body has {count} lists and objects; the limit is {MAX_CONTAINERS}: split it into several requests."
        )


def _check_num_values(fields: list[FieldValues]) -> None:
    """Refuse more values than what parses, reads and frees them gets through in a few milliseconds."""
    left = MAX_FREE_VALUES
    for field in fields:
        shown, most = field.name[:64], _MAX_ITEMS.get(field.name)
        if most is not None and field.num_objects == (field.name in _MAPS):
            if (count := field.num_values - 1) > most:
                raise InvalidRequestError(f"{shown} has {count} entries; the limit is {most}: send fewer.", shown)
            continue
        left -= field.num_values
        if left < 0:
            is_named = len(fields) < MAX_COUNTED_FIELDS
            where = f"{shown} and the fields before it" if is_named else "its fields"
            raise InvalidRequestError(
                f"The body has more than {MAX_FREE_VALUES} values in {where}, which is the limit: send fewer messages, "
                "tools or variables.",
                shown if is_named else None,
            )


def _as_request_error(exc: ValidationError) -> Exception:
    first = exc.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return BadRequestError(f"The body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}.")
    if not first["loc"]:
        return BadRequestError(f"The body must be a JSON object, got {shortened(first.get('input'))}.")
    return field_error(exc)
