"""The OpenAPI document of the server, with what its endpoints really take and answer.

The endpoints read bodies and write answers themselves, so the framework knows neither. Imported when somebody asks for
the document, not before: its models take time to build.
"""

from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from rustvllm.entrypoints.openai import protocol, responses

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
_RETRY_AFTER = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}}
_GUARDED = (401, 503)
_WITH_BODY = (400, 404, 413, 415, 500)


@dataclass(frozen=True)
class _Operation:
    """What one endpoint takes and answers.

    Attributes:
        answer: Of status 200.
        takes: Shapes of its body.
        chunk: Of an event, where it can stream.
        errors: Statuses with an :class:`~rustvllm.entrypoints.openai.responses.ErrorResponse`.
        unavailable: Answer of a 503 that is no error.
    """

    answer: type[BaseModel]
    takes: tuple[type[BaseModel], ...] = ()
    chunk: type[BaseModel] | None = None
    errors: tuple[int, ...] = _GUARDED
    unavailable: type[BaseModel] | None = None


_OPERATIONS = {
    ("post", "/v1/completions"): _Operation(
        responses.CompletionResponse,
        (protocol.CompletionRequest,),
        responses.CompletionChunk,
        (*_WITH_BODY, *_GUARDED),
    ),
    ("post", "/v1/chat/completions"): _Operation(
        responses.ChatCompletionResponse,
        (protocol.ChatCompletionRequest,),
        responses.ChatCompletionChunk,
        (*_WITH_BODY, *_GUARDED),
    ),
    ("post", "/tokenize"): _Operation(
        responses.TokenizeResponse,
        (protocol.TokenizeRequest, protocol.TokenizeChatRequest),
        errors=(*_WITH_BODY, *_GUARDED),
    ),
    ("post", "/detokenize"): _Operation(
        responses.DetokenizeResponse, (protocol.DetokenizeRequest,), errors=(*_WITH_BODY, *_GUARDED)
    ),
    ("get", "/v1/models"): _Operation(responses.ModelList),
    ("get", "/v1/models/{model_id}"): _Operation(responses.ModelCard, errors=(404, *_GUARDED)),
    ("get", "/health"): _Operation(responses.HealthResponse, errors=(), unavailable=responses.HealthResponse),
    ("get", "/ping"): _Operation(responses.HealthResponse, errors=(), unavailable=responses.HealthResponse),
    ("get", "/version"): _Operation(responses.VersionResponse, errors=()),
}
_OPEN_PATHS = frozenset({"/health", "/ping", "/version"})


def document(app: FastAPI, *, needs_key: bool) -> dict[str, Any]:
    """The document of ``app``.

    Args:
        app: What it serves.
        needs_key: The server was started with API keys.
    """
    schema = get_openapi(
        title=app.title, version=app.version, openapi_version=app.openapi_version, description=app.description,
        routes=app.routes,
    )  # fmt: skip
    paths = {path.replace(":path}", "}"): item for path, item in schema["paths"].items()}
    components = schema.setdefault("components", {})
    refs, shared = _schemas()
    components["schemas"] = shared
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, item in paths.items():
        for method, described in item.items():
            described["responses"].pop("422", None)  # it is a 400 here
            known = _OPERATIONS.get((method, path))
            if known is not None:
                _describe(described, known, refs)
            elif path not in _OPEN_PATHS:
                _describe_errors(described["responses"], _GUARDED, refs)
            if path not in _OPEN_PATHS:
                # An empty object: no key is needed.
                described["security"] = [{"key": []}] if needs_key else [{}, {"key": []}]
    schema["paths"] = paths
    return schema


def _describe(described: dict[str, Any], known: _Operation, refs: dict[type[BaseModel], dict[str, Any]]) -> None:
    if known.takes:
        shapes = [refs[shape] for shape in known.takes]
        body = shapes[0] if len(shapes) == 1 else {"anyOf": shapes}
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    content: dict[str, Any] = {"application/json": {"schema": refs[known.answer]}}
    if known.chunk is not None:
        # As OpenAI's own document has it: the schema is that of an event's data. `data: [DONE]` is the last.
        content["text/event-stream"] = {"schema": {"anyOf": [refs[known.chunk], refs[responses.ErrorResponse]]}}
    answers: dict[str, Any] = {
        "200": {"description": _STREAMED if known.chunk else "What was asked for.", "content": content}
    }
    _describe_errors(answers, known.errors, refs)
    if known.unavailable is not None:
        answers["503"] = _json_answer("Requests are not served now; `status` says why.", refs[known.unavailable])
        answers["503"]["headers"] = _RETRY_AFTER
    described["responses"] = answers


def _describe_errors(
    answers: dict[str, Any], errors: tuple[int, ...], refs: dict[type[BaseModel], dict[str, Any]]
) -> None:
    for status in sorted(errors):
        shape = responses.UnauthorizedResponse if status == 401 else responses.ErrorResponse
        answers[str(status)] = _json_answer(_ERRORS[status], refs[shape])
    if 503 in errors:
        answers["503"]["headers"] = _RETRY_AFTER


def _json_answer(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _schemas() -> tuple[dict[type[BaseModel], dict[str, Any]], dict[str, Any]]:
    """References to every model above, and their definitions."""
    models: dict[type[BaseModel], None] = dict.fromkeys((responses.ErrorResponse, responses.UnauthorizedResponse))
    for known in _OPERATIONS.values():
        models.update(dict.fromkeys((known.answer, *known.takes)))
        models.update(dict.fromkeys(model for model in (known.chunk, known.unavailable) if model is not None))
    refs, definitions = models_json_schema([(model, "validation") for model in models], ref_template=_TEMPLATE)
    return {model: refs[model, "validation"] for model in models}, definitions["$defs"]
