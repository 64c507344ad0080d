"""Calls an endpoint of the server's application without HTTP: the same code answers a batch and a client."""

import asyncio
from http import HTTPStatus

from starlette.types import ASGIApp, Message


async def call_endpoint(app: ASGIApp, path: str, body: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
    """``POST`` a JSON body.

    Returns:
        Status, headers and body of the answer. An exception that no handler knows is a 500, as it is over HTTP.
    """
    status, headers, parts = 0, {}, []
    is_sent = False

    async def receive() -> Message:
        nonlocal is_sent
        if is_sent:
            await asyncio.Event().wait()  # this client never goes away
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], dict(message["headers"])
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
        "client": None,
        "server": None,
    }
    try:
        await app(scope, receive, send)
    except Exception:
        if status < HTTPStatus.INTERNAL_SERVER_ERROR:  # nothing answered it
            raise
    return status, headers, b"".join(parts)
