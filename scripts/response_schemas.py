"""Answers held against the schemas that an OpenAPI document gives for them."""

from collections.abc import Iterator
from typing import Any

import jsonschema
import referencing
from jsonschema.protocols import Validator
from referencing.jsonschema import DRAFT202012

Json = Any
_DOCUMENT = "urn:document"


class ResponseSchemas:
    """The response schemas of one document (OpenAPI 3.1, whose schemas are JSON Schema 2020-12).

    Args:
        document: All of it; references lead into its components.
    """

    def __init__(self, document: dict[str, Json]) -> None:
        self._document = document
        resource = referencing.Resource(contents=document, specification=DRAFT202012)
        self._registry: referencing.Registry[Json] = referencing.Registry().with_resource(_DOCUMENT, resource)
        self._validators: dict[str, Validator] = {}

    def violations(
        self, path: str, method: str, status: int, media_type: str, value: Json
    ) -> Iterator[tuple[str, str]]:
        """Where and how a body breaks its schema.

        Args:
            path: The path as the document spells it, with its braces.
            method: Of HTTP, in any case.
            status: Of the answer; ``default`` stands for those that are not listed.
            media_type: Without parameters.
            value: The body, or one event of a stream.

        Yields:
            A place such as ``choices[].message`` and what is wrong there.
        """
        operation = self._document["paths"][path][method.lower()]
        listed = str(status) if str(status) in operation["responses"] else "default"
        if listed not in operation["responses"]:
            yield "", f"no status {status}"
            return
        content = operation["responses"][listed].get("content", {})
        if media_type not in content:
            yield "", f"status {status} as {media_type!r}"
            return
        steps = ["paths", path, method.lower(), "responses", listed, "content", media_type, "schema"]
        pointer = "/".join(step.replace("~", "~0").replace("/", "~1") for step in steps)
        # What a schema says beside a union would only repeat it: the deepest errors name the field.
        for error in self._validator(pointer).iter_errors(value):
            for leaf in _leaves(error):
                yield _place(leaf.absolute_path), leaf.message

    def _validator(self, pointer: str) -> Validator:
        if pointer not in self._validators:
            schema = {"$ref": f"{_DOCUMENT}#/{pointer}"}
            self._validators[pointer] = jsonschema.Draft202012Validator(schema, registry=self._registry)
        return self._validators[pointer]


def _leaves(error: jsonschema.ValidationError) -> Iterator[jsonschema.ValidationError]:
    """The errors inside the alternative that comes closest, or the error itself."""
    if not error.context:
        yield error
        return
    closest = jsonschema.exceptions.best_match([error])
    yield closest if isinstance(closest, jsonschema.ValidationError) else error


def _place(path: Any) -> str:
    """``choices[].message`` for the path of an error: which element of a list it was does not matter."""
    place = ""
    for step in path:
        place += "[]" if isinstance(step, int) else f".{step}"
    return place.removeprefix(".")
