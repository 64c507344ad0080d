"""OpenAI's description of its API, cut down to the endpoints that are served here.

Runs in the environment `schemas` of `scripts/client_environments.sh`. The whole document describes 182 paths in 3 MB;
what is kept of it are the paths of completions, chat completions, responses and models with the schemas that these
refer to.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

PATHS = (
    "/completions",
    "/chat/completions",
    "/chat/completions/{completion_id}",
    "/chat/completions/{completion_id}/messages",
    "/responses",
    "/responses/{response_id}",
    "/responses/{response_id}/cancel",
    "/responses/{response_id}/input_items",
    "/models",
    "/models/{model}",
)
ERROR = "#/components/schemas/ErrorResponse"
"""What an error's body is; no path refers to it."""
Json = Any


def _references(value: Json) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "$ref" and isinstance(inner, str):
                yield inner
            else:
                yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)


def _with_null(value: Json) -> Json:
    """``value`` with the ``nullable`` of OpenAPI 3.0, of which some is left, as the null of 3.1."""
    if isinstance(value, list):
        return [_with_null(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    value = {key: _with_null(inner) for key, inner in value.items()}
    if value.get("nullable") is not True:
        return value
    del value["nullable"]
    if not isinstance(value.get("type"), str):
        return {"anyOf": [value, {"type": "null"}]}
    if "enum" in value:
        value["enum"].append(None)
    return {**value, "type": [value["type"], "null"]}


def load_openai_document(path: Path) -> dict[str, Json]:
    """The document at ``path`` with :data:`PATHS` and the components they need."""
    with path.open("rb") as file:
        whole = yaml.load(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 (both are safe)
    paths = {name: whole["paths"][name] for name in PATHS}
    components: dict[str, dict[str, Json]] = {"securitySchemes": whole["components"]["securitySchemes"]}
    ahead = [*_references(paths), ERROR]
    while ahead:
        _, _, kind, name = ahead.pop().split("/")
        kept = components.setdefault(kind, {})
        if name not in kept:
            kept[name] = whole["components"][kind][name]
            ahead += _references(kept[name])
    document = {key: whole[key] for key in ("openapi", "info", "servers", "security")}
    return {**document, "paths": _with_null(paths), "components": _with_null(components)}
