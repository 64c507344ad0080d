"""The OpenAPI document as one HTML page: endpoints, their fields and their answers, without a script."""

import base64
import hashlib
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Final

_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 60rem; padding: 1rem; color-scheme: light dark }
h2 { margin-top: 2.5rem; overflow-wrap: anywhere } h3 { margin-bottom: .25rem }
table { border-collapse: collapse; display: block; overflow-x: auto }
td, th { border-bottom: 1px solid #8884; padding: .25rem .75rem .25rem 0; text-align: left; vertical-align: top }
code { font: 13px ui-monospace, monospace }
"""
_MAX_SHOWN_CHOICES: Final = 12

Schema = Mapping[str, Any]


def docs_page(document: Schema) -> tuple[str, dict[str, str]]:
    """The page, and the headers that it is sent with.

    Args:
        document: In OpenAPI's form.
    """
    info = document["info"]
    title = escape(f"{info['title']} {info['version']}")
    body = "".join((*_endpoints(document), *_shapes(document["components"]["schemas"])))
    html = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>"
        f'<p>{escape(info.get("description", ""))} For programs: <a href="openapi.json">openapi.json</a>.</p>'
        f"{body}</body></html>"
    )
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode("ascii")
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return html, {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}


def _endpoints(document: Schema) -> Iterator[str]:
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            yield f"<h2><code>{escape(method.upper())} {escape(path)}</code></h2>"
            yield f"<p>{escape(described.get('description') or described.get('summary', ''))}</p>"
            body = described.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            if body is not None:
                yield f"<p>Takes {_kind(body)}.</p>"
            rows = "".join(
                f"<tr><td><code>{escape(status)}</code></td><td>{escape(answer.get('description', ''))}</td>"
                f"<td>{_answers(answer)}</td></tr>"
                for status, answer in described["responses"].items()
            )
            yield f"<table><tr><th>Status</th><th>When</th><th>Answer</th></tr>{rows}</table>"


def _answers(answer: Schema) -> str:
    return "<br>".join(
        f"{_kind(content.get('schema', {}))} <small>({escape(media)})</small>"
        for media, content in answer.get("content", {}).items()
    )


def _shapes(schemas: Schema) -> Iterator[str]:
    yield "<h2>Shapes</h2>"
    for name, schema in schemas.items():
        yield f'<h3 id="{escape(name)}"><code>{escape(name)}</code></h3><p>{escape(schema.get("description", ""))}</p>'
        required = schema.get("required", ())
        rows = "".join(
            f"<tr><td><code>{escape(field)}</code>{'' if field in required else ' <small>optional</small>'}</td>"
            f"<td>{_kind(shape)}</td><td>{escape(shape.get('description', ''))}</td></tr>"
            for field, shape in schema.get("properties", {}).items()
        )
        if rows:
            yield f"<table><tr><th>Field</th><th>Type</th><th></th></tr>{rows}</table>"


def _kind(schema: Schema) -> str:
    """A type in words, with links to the shapes it names."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rsplit("/", 1)[-1])
        return f'<a href="#{name}"><code>{name}</code></a>'
    for joined in ("anyOf", "oneOf", "allOf"):
        if joined in schema:
            return " or ".join(dict.fromkeys(map(_kind, schema[joined])))
    if "enum" in schema or "const" in schema:
        choices = schema.get("enum", [schema.get("const")])
        shown = ", ".join(f"<code>{escape(str(choice))}</code>" for choice in choices[:_MAX_SHOWN_CHOICES])
        return shown + (", …" if len(choices) > _MAX_SHOWN_CHOICES else "")
    kind = escape(str(schema.get("type", "anything")))
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    limits = [
        f"{sign} {schema[name]}"
        for name, sign in (("exclusiveMinimum", "&gt;"), ("minimum", "≥"), ("maximum", "≤"), ("maxLength", "length ≤"))
        if name in schema
    ]
    return f"{kind} {', '.join(limits)}".rstrip()
