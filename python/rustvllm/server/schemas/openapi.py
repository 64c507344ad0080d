"""The OpenAPI document of the server, with what its endpoints really take and answer.

The endpoints read bodies and write answers themselves, so the framework knows neither. Imported when a client asks for
the document, not before: its models take time to build.
"""

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from rustvllm.server.http.endpoint import Endpoint
from rustvllm.server.schemas import responses

_TEMPLATE = "#/components/schemas/{model}"
_ERRORS = {
    400: "The request is wrong: `param` names the field, `message` the value and the limit.",
    401: "The API key is missing or wrong.",
    404: "No such model.",
    413: "The body is larger than `--max-body-bytes`.",
    415: "The body is compressed.",
    500: "The engine failed.",
    503: "The server is loading, stopping or full; `Retry-After` says when to try again.",
}
_STREAMED = (
    "What was asked for. With `stream`, server-sent events: each line `data: ` has an object of the second schema and "
    "an empty line behind it, the last is `data: [DONE]`. What fails half-way is an event with an error."
)
_NAMED_EVENTS = (
    "What was asked for. With `stream`, server-sent events: each has a line `event: ` with its `type`, a line `data: ` "
    "with an object of the second schema, and an empty line behind it. What fails half-way is an event with an error."
)
_RETRY_AFTER = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}}
_GUARDED = (401, 503)
"""What the front door answers for an endpoint that is not open."""


def document(app: FastAPI, endpoints: Iterable[Endpoint], *, needs_key: bool) -> dict[str, Any]:
    """The document of ``app``.

    Args:
        app: What it serves.
        endpoints: Their rows say what the framework cannot know.
        needs_key: The server was started with API keys.
    """
    rows = {(row.method.lower(), row.path.replace(":path}", "}")): row for row in endpoints if row.is_documented}
    schema = get_openapi(
        title=app.title, version=app.version, openapi_version=app.openapi_version, description=app.description,
        routes=app.routes,
    )  # fmt: skip
    paths = {path.replace(":path}", "}"): item for path, item in schema["paths"].items()}
    components = schema.setdefault("components", {})
    refs, shared = _schemas(rows.values())
    components["schemas"] = shared
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, item in paths.items():
        for method, described in item.items():
            described["responses"].pop("422", None)  # it is a 400 here
            row = rows[method, path]
            _describe(described, row, refs)
            if not row.is_open:
                # An empty object: no key is needed.
                described["security"] = [{"key": []}] if needs_key else [{}, {"key": []}]
    schema["paths"] = paths
    return schema


def _describe(described: dict[str, Any], row: Endpoint, refs: dict[type[BaseModel], dict[str, Any]]) -> None:
    if row.takes:
        shapes = [refs[shape] for shape in row.takes]
        body = shapes[0] if len(shapes) == 1 else {"anyOf": shapes}
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    answers = described["responses"]
    if row.answer is not None:
        content: dict[str, Any] = {"application/json": {"schema": refs[row.answer]}}
        if row.chunk is not None:
            # As OpenAI's own document has it: the schema is that of an event's data. `data: [DONE]` is the last.
            events = [refs[row.chunk], refs[row.error or responses.ErrorResponse]]
            content["text/event-stream"] = {"schema": {"anyOf": events}}
        streamed = _NAMED_EVENTS if row.names_events else _STREAMED
        description = streamed if row.chunk else "What was asked for."
        answers = {"200": {"description": description, "content": content}}
    if row.media_types:
        answers["200"]["content"] = {kind: {"schema": {"type": "string"}} for kind in row.media_types}
    guarded = row.errors if row.is_open else (*row.errors, *_GUARDED)
    shape = refs[row.error or responses.ErrorResponse]
    _describe_errors(answers, guarded, shape, refs[row.error or responses.UnauthorizedResponse])
    if row.unavailable is not None:
        answers["503"] = _json_answer("Requests are not served now; `status` says why.", refs[row.unavailable])
        answers["503"]["headers"] = _RETRY_AFTER
    described["responses"] = answers


def _describe_errors(
    answers: dict[str, Any], errors: tuple[int, ...], shape: dict[str, Any], unauthorized: dict[str, Any]
) -> None:
    for status in sorted(errors):
        answers[str(status)] = _json_answer(_ERRORS[status], unauthorized if status == 401 else shape)
    if 503 in errors:
        answers["503"]["headers"] = _RETRY_AFTER


def _json_answer(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _schemas(
    rows: Iterable[Endpoint],
) -> tuple[dict[type[BaseModel], dict[str, Any]], dict[str, Any]]:
    """References to every model of the rows, and their definitions."""
    models: dict[type[BaseModel], None] = dict.fromkeys((responses.ErrorResponse, responses.UnauthorizedResponse))
    for row in rows:
        named = (row.answer, *row.takes, row.chunk, row.error, row.unavailable)
        models.update(dict.fromkeys(model for model in named if model is not None))
    refs, definitions = models_json_schema([(model, "validation") for model in models], ref_template=_TEMPLATE)
    return {model: refs[model, "validation"] for model in models}, definitions["$defs"]
