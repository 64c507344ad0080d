"""Answers held against the schemas that an OpenAPI document gives for them."""

from collections.abc import Iterator
from typing import Any

import jsonschema
import referencing
from jsonschema.protocols import Validator
from referencing.jsonschema import DRAFT202012

Json = Any
_DOCUMENT = "urn:document"
_TYPES = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list", dict: "an object"}


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
        yield from self._violations(steps, value)

    def component_violations(self, name: str, value: Json) -> Iterator[tuple[str, str]]:
        """The same for a schema among the document's components."""
        yield from self._violations(["components", "schemas", name], value)

    def _violations(self, steps: list[str], value: Json) -> Iterator[tuple[str, str]]:
        pointer = "/".join(step.replace("~", "~0").replace("/", "~1") for step in steps)
        for error in self._validator(pointer).iter_errors(value):
            for leaf in _leaves(error):
                yield _described(leaf)

    def _validator(self, pointer: str) -> Validator:
        if pointer not in self._validators:
            schema = {"$ref": f"{_DOCUMENT}#/{pointer}"}
            self._validators[pointer] = jsonschema.Draft202012Validator(schema, registry=self._registry)
        return self._validators[pointer]


def _leaves(error: jsonschema.ValidationError) -> Iterator[jsonschema.ValidationError]:
    """The errors inside the alternative of a union that a value comes closest to, or the error itself."""
    branches: dict[Any, list[jsonschema.ValidationError]] = {}
    for inner in error.context or ():
        branches.setdefault(inner.relative_schema_path[0], []).append(inner)
    # An alternative of another type, such as null, says nothing of the value's fields.
    near = [errors for errors in branches.values() if not any(_is_of_another_type(inner) for inner in errors)]
    if not near:
        yield error
        return
    for inner in min(near, key=len):
        yield from _leaves(inner)


def _is_of_another_type(error: jsonschema.ValidationError) -> bool:
    return error.validator == "type" and not error.relative_path


def _described(error: jsonschema.ValidationError) -> tuple[str, str]:
    """Place and fault of an error, without what differs from answer to answer."""
    place = _place(error.absolute_path)
    if error.validator == "required":
        missing = next(name for name in error.validator_value if name not in error.instance)
        return f"{place}.{missing}".removeprefix("."), "missing"
    if error.instance is None:
        return place, "null"
    if error.validator == "enum":
        return place, f"{error.instance!r} is not listed"
    if error.validator in ("type", "anyOf", "oneOf"):
        return place, f"{_TYPES[type(error.instance)]}, which it must not be"
    return place, error.message


def _place(path: Any) -> str:
    """``choices[].message`` for the path of an error: which element of a list it was does not matter."""
    place = ""
    for step in path:
        place += "[]" if isinstance(step, int) else f".{step}"
    return place.removeprefix(".")
