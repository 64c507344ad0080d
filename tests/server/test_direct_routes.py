"""``DirectRoutes``: what it answers itself looks as if the framework had answered, errors included."""

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from rustvllm.server.http.front_door import DirectRoutes


class KnownError(Exception):
    """One that has a handler."""


async def fine(request: Request) -> Response:
    return PlainTextResponse("fine " + (await request.body()).decode())


async def known(request: Request) -> Response:
    raise KnownError("known")


async def unknown(request: Request) -> Response:
    raise LookupError("unknown")


class Broken(Response):
    """Fails on the way out."""

    def __init__(self, after_start: bool) -> None:
        super().__init__(b"")
        self.after_start = after_start

    async def __call__(self, scope, receive, send) -> None:
        if self.after_start:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise KnownError("late")


async def broken_before(request: Request) -> Response:
    return Broken(after_start=False)


async def broken_after(request: Request) -> Response:
    return Broken(after_start=True)


async def handle(request: Request, exc: Exception) -> Response:
    return PlainTextResponse(f"handled {exc}", status_code=418)


ENDPOINTS = {
    ("POST", "/fine"): fine,
    ("GET", "/known"): known,
    ("GET", "/unknown"): unknown,
    ("GET", "/before"): broken_before,
    ("GET", "/after"): broken_after,
}


async def call(method: str, path: str, root_path: str = "") -> tuple[int, bytes]:
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"body", "more_body": False}

    async def send(message):
        sent.append(message)

    app = DirectRoutes(Starlette(), ENDPOINTS, {KnownError: handle})
    scope = {"type": "http", "method": method, "path": path, "root_path": root_path, "headers": [], "query_string": b""}
    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


@pytest.mark.parametrize(
    ("method", "path", "root_path", "answer"),
    [
        ("POST", "/fine", "", (200, b"fine body")),
        ("POST", "/below/fine", "/below", (200, b"fine body")),
        ("GET", "/known", "", (418, b"handled known")),
        ("GET", "/before", "", (418, b"handled late")),
        ("GET", "/fine", "", (404, b"Not Found")),
        ("POST", "/fine/", "", (404, b"Not Found")),
    ],
)
async def test_answers(method, path, root_path, answer):
    assert await call(method, path, root_path) == answer


async def test_an_error_without_a_handler_goes_on():
    with pytest.raises(LookupError):
        await call("GET", "/unknown")


async def test_an_answer_that_has_begun_gets_no_second_one():
    with pytest.raises(KnownError):
        await call("GET", "/after")


async def test_everything_else_passes():
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["type"])

    await DirectRoutes(app, ENDPOINTS, {})({"type": "lifespan"}, None, None)
    assert seen == ["lifespan"]
