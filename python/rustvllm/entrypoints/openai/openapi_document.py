"""The OpenAPI document of the server, made when somebody asks for ``/openapi.json``.

FastAPI finds the paths. What it cannot know is added here: the endpoints read their bodies and build their answers
themselves, so each one's models are listed below.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from rustvllm.entrypoints.openai import protocol

_REF = "#/components/schemas/{model}"


def openapi_document(app: FastAPI) -> dict[str, Any]:
    """The document of an application's routes."""
    from fastapi.openapi.utils import get_openapi
    from pydantic.json_schema import models_json_schema

    from rustvllm.entrypoints.openai import response_models as answers

    bodies: dict[tuple[str, str], tuple[type[BaseModel], ...]] = {
        ("post", "/v1/completions"): (protocol.CompletionRequest,),
        ("post", "/v1/chat/completions"): (protocol.ChatCompletionRequest,),
        ("post", "/tokenize"): (protocol.TokenizeRequest, protocol.TokenizeChatRequest),
        ("post", "/detokenize"): (protocol.DetokenizeRequest,),
    }
    responses: dict[tuple[str, str], type[BaseModel]] = {
        ("post", "/v1/completions"): answers.Completion,
        ("post", "/v1/chat/completions"): answers.ChatCompletion,
        ("post", "/tokenize"): answers.TokenizeAnswer,
        ("post", "/detokenize"): answers.DetokenizeAnswer,
        ("get", "/v1/models"): answers.ModelList,
        ("get", "/v1/models/{model_id}"): answers.ModelCard,
    }
    events: dict[tuple[str, str], type[BaseModel]] = {
        ("post", "/v1/completions"): answers.CompletionChunk,
        ("post", "/v1/chat/completions"): answers.ChatCompletionChunk,
    }
    models = [model for several in bodies.values() for model in several]
    models += [*responses.values(), *events.values(), answers.ErrorAnswer]
    _, definitions = models_json_schema([(model, "validation") for model in models], ref_template=_REF)
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    document.setdefault("components", {})["schemas"] = definitions["$defs"]
    for key, operation in _operations(document):
        if key in bodies:
            references = [_reference(model) for model in bodies[key]]
            schema = references[0] if len(references) == 1 else {"anyOf": references}
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        operation["responses"].pop("422", None)  # FastAPI's own, which is answered as 400 here
        good = operation["responses"]["200"]
        if key in responses:
            good["content"] = {"application/json": {"schema": _reference(responses[key])}}
        if key in events:
            good["description"] = "The answer; with `stream`, server-sent events of the second form, then [DONE]."
            good["content"]["text/event-stream"] = {"schema": _reference(events[key])}
        error = {"application/json": {"schema": _reference(answers.ErrorAnswer)}}
        if key[1] not in ("/health", "/ping"):
            operation["responses"]["default"] = {"description": "An error.", "content": error}
    return document


def _operations(document: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield (method, path), operation


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}
