"""``response_format`` and ``structured_outputs`` of a request, as what its output must be."""

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, Final

from rustvllm.exceptions import InvalidRequestError
from rustvllm.parameter_checks import shown
from rustvllm.sampling_params.structured_outputs import (
    GatedOutputs,
    MessageOutputs,
    StructuredOutputsParams,
    shown_places,
)
from rustvllm.server.schemas.protocol import GenerationRequest

UNENFORCED_HEADER: Final = b"x-unenforced-schema"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FIELDS = tuple(field.name for field in fields(StructuredOutputsParams) if field.init)


class _ResponseFormat(StructuredOutputsParams):
    """The same under its name of OpenAI's, for errors."""

    param: ClassVar[str] = "response_format"


def read_structured_outputs(request: GenerationRequest) -> StructuredOutputsParams | None:
    """What the output of a request must be; None: any text.

    Raises:
        InvalidRequestError: A field is wrong, or both ask for something; ``param`` names the field.
    """
    by_format = _of_response_format(request.response_format)
    if request.structured_outputs is None:
        return by_format
    if by_format is not None:
        raise InvalidRequestError(
            "response_format and structured_outputs both set the format of the answer: send only one of them.",
            "structured_outputs",
        )
    unknown = sorted(request.structured_outputs.keys() - set(_FIELDS))
    if unknown:
        raise InvalidRequestError(
            f"structured_outputs has the unknown field {unknown[0]:.64}; the fields are {', '.join(_FIELDS)}.",
            "structured_outputs",
        )
    given = {name: value for name, value in request.structured_outputs.items() if value is not None}
    return StructuredOutputsParams(**given)


def unenforced_header(wanted: StructuredOutputsParams | None) -> tuple[bytes, bytes] | None:
    """The header that says what of a schema is not enforced, once it was checked; None: all is."""
    if isinstance(wanted, GatedOutputs | MessageOutputs):
        wanted = wanted.answer
    if wanted is None or not wanted.unenforced.count:
        return None
    return UNENFORCED_HEADER, shown_places(wanted.unenforced).encode("ascii")


def _of_response_format(response_format: Mapping[str, Any] | None) -> StructuredOutputsParams | None:
    if response_format is None:
        return None
    match response_format.get("type"):
        case "text":
            return None
        case "json_object":
            return _ResponseFormat(json_object=True)
        case "json_schema":
            asked = response_format.get("json_schema")
            return _ResponseFormat(json=_schema(asked), strict=_is_strict(asked))
        case "structural_tag":
            return _ResponseFormat(structural_tag=response_format)
        case other:
            raise InvalidRequestError(
                "response_format must have the type text, json_object, json_schema or structural_tag, "
                f"got {shown(other)}.",
                "response_format",
            )


def _schema(asked: object) -> Mapping[str, Any] | bool:
    """The schema of ``json_schema``."""
    if not isinstance(asked, Mapping):
        raise InvalidRequestError(
            "response_format of type json_schema needs a json_schema with a name and a schema.", "response_format"
        )
    name, schema = asked.get("name"), asked.get("schema")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"json_schema.name must have 1 to 64 characters out of A-Z a-z 0-9 _ -, got {shown(name)}.",
            "response_format",
        )
    if not isinstance(schema, Mapping | bool):
        raise InvalidRequestError(
            f"json_schema.schema must be an object or a boolean, got {type(schema).__name__}.", "response_format"
        )
    return schema


def _is_strict(asked: object) -> bool:
    """Whether a schema of which a keyword cannot be enforced is refused."""
    strict = asked.get("strict") if isinstance(asked, Mapping) else None
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequestError(f"json_schema.strict must be true or false, got {shown(strict)}.", "response_format")
    return bool(strict)
