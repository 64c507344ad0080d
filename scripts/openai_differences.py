r"""Finds how this API differs from OpenAI's: asks a running server, and holds its answers against OpenAI's document.

    .venv/clients/schemas/bin/python scripts/openai_differences.py --url http://127.0.0.1:8000 \
        --document ../shared/data/openai-openapi/openapi.yaml [--against docs/openai-differences.md]

Prints one row per difference, as docs/openai-differences.md lists them: area, place, what. With `--against` it compares
with that list instead and ends with status 1 when one of the two has a row that the other lacks. The environment is
made by `scripts/client_environments.sh`.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests
from openai_document import load_openai_document
from openai_probes import ANSWERS, BASES, LENGTHS, OPENAI_SCHEMAS, OUR_SCHEMAS, probe
from response_schemas import ResponseSchemas

TIMEOUT_SECONDS = 60
Json = Any
Difference = tuple[str, str, str]
_NO_LIMIT = object()


class Api:
    """The running server.

    Attributes:
        model: A name that it serves.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self.model = self.get("/v1/models").json()["data"][0]["id"]

    def get(self, path: str) -> requests.Response:
        """A GET request."""
        return requests.get(self._url + path, timeout=TIMEOUT_SECONDS)

    def ask(self, path: str, **fields: Json) -> requests.Response:
        """A generating request with the least that it needs, and ``fields``."""
        body = {"model": self.model, LENGTHS[path]: 2, **BASES[path], **fields}
        return requests.post(f"{self._url}/v1{path}", json=body, timeout=TIMEOUT_SECONDS)

    def any(self, method: str, path: str) -> requests.Response:
        """A request without a body."""
        return requests.request(method, f"{self._url}/v1{path}", timeout=TIMEOUT_SECONDS)


class Schemas:
    """OpenAI's schemas, with their references followed."""

    def __init__(self, document: dict[str, Json]) -> None:
        self._components = document["components"]["schemas"]

    def parts(self, schema: Json) -> Iterator[dict[str, Json]]:
        """A schema and everything it is made of: what it refers to, its alternatives and its parts."""
        if "$ref" in schema:
            yield from self.parts(self._components[schema["$ref"].rsplit("/", 1)[-1]])
            return
        yield schema
        for key in ("allOf", "anyOf", "oneOf"):
            for part in schema.get(key, ()):
                yield from self.parts(part)

    def properties(self, name: str) -> dict[str, Json]:
        """The fields of a component."""
        found: dict[str, Json] = {}
        for part in self.parts(self._components[name]):
            found.update(part.get("properties", {}))
        return found

    def limit(self, schema: Json, name: str) -> Json:
        """A bound such as ``maximum`` of a field."""
        return next((part[name] for part in self.parts(schema) if name in part), _NO_LIMIT)

    def unknown_fields(self, schemas: list[Json], value: Json, place: str = "") -> Iterator[str]:
        """Places of ``value`` that none of ``schemas`` has."""
        parts = [part for schema in schemas for part in self.parts(schema)]
        if isinstance(value, list):
            items = [part["items"] for part in parts if "items" in part]
            for inner in value:
                yield from self.unknown_fields(items, inner, f"{place}[]")
        elif isinstance(value, dict) and not any(isinstance(part.get("additionalProperties"), dict) for part in parts):
            for name, inner in value.items():
                known = [part["properties"][name] for part in parts if name in part.get("properties", {})]
                here = f"{place}.{name}".removeprefix(".")
                if known:
                    yield from self.unknown_fields(known, inner, here)
                else:
                    yield here


def bodies_of(response: requests.Response) -> list[Json]:
    """The body of an answer, or the events of a stream."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        return [response.json()]
    frames = response.text.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]
    return [json.loads(frame[frame.index("data: ") :].removeprefix("data: ")) for frame in frames]


def in_answers(
    api: Api, schemas: Schemas, responses: ResponseSchemas, document: dict[str, Json]
) -> Iterator[Difference]:
    """What answers have that OpenAI's schema forbids, lack, or have beyond it."""
    for path, name, fields in ANSWERS:
        response = api.ask(path, **fields) if path in BASES else api.get("/v1" + path.format(model=api.model))
        if response.status_code != 200:
            sys.exit(f"{path} with {fields} was answered {response.status_code}: {response.text}")
        method = "post" if path in BASES else "get"
        content = document["paths"][path][method]["responses"]["200"]["content"]
        streamed = response.headers["content-type"].startswith("text/event-stream")
        media_type = "text/event-stream" if streamed and "text/event-stream" in content else "application/json"
        for body in bodies_of(response):
            for place, what in responses.violations(path, method, 200, media_type, body):
                yield f"answer: {name}", place, what
            for place in schemas.unknown_fields([content[media_type]["schema"]], body):
                yield f"answer: {name}", place, "not OpenAI's"


def in_errors(api: Api, schemas: Schemas, responses: ResponseSchemas) -> Iterator[Difference]:
    """The same for the bodies of errors."""
    for response in (api.ask("/completions", n=0), api.ask("/chat/completions", model="x"), api.any("GET", "/nothing")):
        for place, what in responses.component_violations("ErrorResponse", response.json()):
            yield "answer: errors", place, what
        for place in schemas.unknown_fields([{"$ref": "#/components/schemas/ErrorResponse"}], response.json()):
            yield "answer: errors", place, "not OpenAI's"


def in_fields(api: Api, schemas: Schemas, served: dict[str, Json]) -> Iterator[Difference]:
    """Fields that are refused, ignored, or not OpenAI's; and values where the two draw lines differently."""
    for path, component in OPENAI_SCHEMAS.items():
        theirs = schemas.properties(component)
        ours = served["components"]["schemas"][OUR_SCHEMAS[path]]["properties"]
        area = f"request: {path}"
        asked = theirs.keys() - BASES[path].keys() - {"model"}
        if missing := sorted(name for name in asked if probe(path, name) is None):
            sys.exit(f"openai_probes.py has no value for {missing}")
        for name, schema in theirs.items():
            if name in BASES[path] or name == "model":
                continue
            response = api.ask(path, **(probe(path, name) or {}))
            if response.status_code != 200:
                yield area, name, "refused"
            elif name not in ours:
                yield area, name, "ignored"
            else:
                yield from at_limits(api, schemas, path, name, schema)
        for name in ours.keys() - theirs.keys():
            yield area, name, "not OpenAI's"


def at_limits(api: Api, schemas: Schemas, path: str, name: str, schema: Json) -> Iterator[Difference]:
    """Values at OpenAI's bounds that are refused here, and values beyond them that are served."""
    others = {other: value for other, value in (probe(path, name) or {}).items() if other != name}
    for bound, step in (("minimum", -1), ("maximum", 1)):
        limit = schemas.limit(schema, bound)
        if limit is _NO_LIMIT or abs(limit) > 2**53:
            continue
        if api.ask(path, **{**others, name: limit}).status_code != 200:
            yield f"request: {path}", name, f"{limit} is refused"
        if api.ask(path, **{**others, name: limit + step}).status_code == 200:
            yield f"request: {path}", name, "more is served" if step > 0 else "less is served"
    most = schemas.limit(schema, "maxItems")
    if name == "stop" and most is not _NO_LIMIT and api.ask(path, stop=["a"] * (most + 1)).status_code == 200:
        yield f"request: {path}", name, "more is served"


def in_endpoints(api: Api, document: dict[str, Json]) -> Iterator[Difference]:
    """Methods of the paths that OpenAI has and this server lacks."""
    for path, methods in document["paths"].items():
        for method in methods.keys() & {"get", "post", "delete"}:
            status = api.any(method.upper(), re.sub(r"\{\w+\}", "x", path)).status_code
            if status == 405 or (status == 404 and path != "/models/{model}"):
                yield "endpoints", f"{method.upper()} {path}", f"{status}"


def together(found: set[Difference]) -> set[Difference]:
    """What is the same for completions and chat completions, once."""
    areas = ["request: /completions", "request: /chat/completions"]
    shared = set.intersection(*({(place, what) for area, place, what in found if area == own} for own in areas))
    kept = {row for row in found if not (row[0] in areas and row[1:] in shared)}
    return kept | {("requests", place, what) for place, what in shared}


def listed(page: Path) -> set[Difference]:
    """The rows of the tables of a page: its first three cells, without the marks of code."""
    rows = set()
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 4:
            rows.add((cells[0], cells[1], cells[2]))
    return rows


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="a running server, without /v1")
    parser.add_argument("--document", type=Path, required=True, help="OpenAI's openapi.yaml")
    parser.add_argument("--against", type=Path, help="the page that must list the same")
    arguments = parser.parse_args()
    api = Api(arguments.url.rstrip("/"))
    document = load_openai_document(arguments.document)
    schemas, responses = Schemas(document), ResponseSchemas(document)
    differences = {
        *in_answers(api, schemas, responses, document),
        *in_errors(api, schemas, responses),
        *in_fields(api, schemas, api.get("/openapi.json").json()),
        *in_endpoints(api, document),
    }
    found = together(differences)
    if arguments.against is None:
        for area, place, what in sorted(found):
            print(f"| `{area}` | `{place}` | {what} | |")
        return 0
    known = listed(arguments.against)
    for row in sorted(found - known):
        print("not listed:", " | ".join(row))
    for row in sorted(known - found):
        print("listed, but not found:", " | ".join(row))
    print(f"{len(found)} differences found, {len(known)} listed")
    return 0 if found == known else 1


if __name__ == "__main__":
    sys.exit(main())
