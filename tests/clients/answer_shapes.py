"""What of an answer two servers must have in common: its status and the keys of its objects, not their values."""

import json
from dataclasses import dataclass
from typing import Any

import httpx
from request_corpus import Case

BY_TOKEN = {"top_logprobs", "prompt_logprobs"}
"""Objects whose keys are tokens."""


@dataclass(frozen=True)
class Shape:
    """An answer without its values.

    Attributes:
        status: Of HTTP.
        keys: Paths of all keys, of all events together in a stream; places of lists are ``[]``, tokens ``*``.
        kind: ``json``, ``stream`` or ``other``.
        message: Of an error, for people.
    """

    status: int
    keys: frozenset[str]
    kind: str
    message: str = ""

    def is_like(self, other: "Shape") -> bool:
        """Whether status, kind and keys are the same."""
        return (self.status, self.kind, self.keys) == (other.status, other.kind, other.keys)


def ask(client: httpx.Client, case: Case) -> Shape:
    """Send a request and look at its answer."""
    if isinstance(case.body, bytes):
        content: bytes | None = case.body
    else:
        content = None if case.body is None else json.dumps(case.body).encode()
    headers = {} if content is None else {"Content-Type": "application/json"}
    answer = client.request(case.method, case.path, content=content, headers=headers)
    kind = answer.headers.get("content-type", "").partition(";")[0]
    if kind == "text/event-stream":
        events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
        keys = frozenset().union(*(paths(json.loads(event)) for event in events if event != "[DONE]"))
        return Shape(answer.status_code, keys | {"[DONE]"} if "[DONE]" in events else keys, "stream")
    try:
        body = answer.json()
    except ValueError:
        return Shape(answer.status_code, frozenset(), "other", answer.text[:80])
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message", "") if isinstance(error, dict) else str(error or "")
    return Shape(answer.status_code, paths(body), "json", message[:160])


def paths(value: Any, at: str = "") -> frozenset[str]:
    """The paths of all keys in a value."""
    found: set[str] = set()
    if isinstance(value, dict):
        is_by_token = at.rpartition(".")[2].removesuffix("[]") in BY_TOKEN and "content" not in at
        for key, inner in value.items():
            path = f"{at}.*" if is_by_token else f"{at}.{key}"
            found |= {path} | paths(inner, path)
    elif isinstance(value, list):
        for inner in value:
            found |= paths(inner, f"{at}[]")
    return frozenset(found)
