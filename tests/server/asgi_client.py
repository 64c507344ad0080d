"""Calls the application in this process, and reads event streams as a client does."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fake_engine import FakeEngine

from rustvllm.server.app import build_app
from rustvllm.server.state import ServerSettings, ServerState


@asynccontextmanager
async def serving(
    engine: FakeEngine | None = None, settings: ServerSettings | None = None, *, raise_unforeseen: bool = True
) -> AsyncIterator[tuple[httpx.AsyncClient, FakeEngine]]:
    """A client of an application that serves ``engine``."""
    engine = engine or FakeEngine()
    state = ServerState(settings)
    state.set_ready(engine)
    async with client_of(state, raise_unforeseen=raise_unforeseen) as client:
        yield client, engine
    state.close()
    await asyncio.sleep(0)  # a connection is closed in the next turn of the loop
    assert not engine.running, "every engine request must have ended with the HTTP request"


@asynccontextmanager
async def client_of(state: ServerState, *, raise_unforeseen: bool = True) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application of ``state``."""
    transport = httpx.ASGITransport(build_app(state), raise_app_exceptions=raise_unforeseen)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        yield client


async def leaving(app: Any, url: str, body: dict[str, Any], gone: asyncio.Event) -> list[dict[str, Any]]:
    """Calls the application as an ASGI server does whose client leaves when ``gone`` is set; gives what was sent."""
    content, sent = [json.dumps(body).encode()], list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        if content:
            return {"type": "http.request", "body": content.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(post_scope(url), receive, send)
    return sent


def post_scope(url: str, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    """The ASGI scope of a request with a body in JSON; ``headers`` are further ones."""
    usual = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": url, "raw_path": url.encode(), "query_string": b"", "root_path": "", "headers": [*usual, *headers],
        "client": ("127.0.0.1", 1), "server": ("localhost", 80), "state": {},
    }  # fmt: skip


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a finished stream, checked to be framed exactly and to end with ``[DONE]``."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    assert frames.pop() == "data: [DONE]"
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    """The members that say something: a whole answer has many that are null, an event leaves most of them out."""
    return {name: value for name, value in fields.items() if value is not None}


def assert_error(
    response: httpx.Response, status: int, kind: str, *, param: str | None = None, says: tuple[str, ...] = ()
) -> None:
    """The response is exactly an OpenAI error with these properties, and its message says all of ``says``."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == kind
    assert error["code"] == status
    assert error["param"] == param, error
    for words in says:
        assert words in error["message"], error["message"]
