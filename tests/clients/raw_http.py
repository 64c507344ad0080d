"""Bytes to a server's socket, and its answers as a strict parser reads them."""

import json
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import h11

ANSWER_SECONDS = 60


@dataclass
class Answer:
    """One whole response."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


def connect(url: str) -> socket.socket:
    """A connection to the server, on which nothing waits for ever."""
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=ANSWER_SECONDS)


def read_answers(connection: socket.socket, most: int, method: str = "GET") -> list[Answer]:
    """Up to ``most`` responses, or as many as come before the server closes.

    Raises:
        h11.RemoteProtocolError: What came is not HTTP, or stops in the middle.
    """
    answers: list[Answer] = []
    parser = None
    pending = b""
    while len(answers) < most:
        if parser is None:
            # The parser reads no answer before it believes that something was asked.
            parser = h11.Connection(h11.CLIENT)
            parser.send(h11.Request(method=method, target="/", headers=[("Host", "server")]))
            parser.send(h11.EndOfMessage())
            head, body = None, b""
            if pending:
                parser.receive_data(pending)
        event = parser.next_event()
        if event is h11.NEED_DATA:
            try:
                data = connection.recv(65536)
            except ConnectionResetError:
                data = b""  # it closed with some of our bytes unread
            if not data and parser.their_state is h11.SEND_RESPONSE and not parser.trailing_data[0]:
                return answers
            parser.receive_data(data)
        elif isinstance(event, h11.Response):
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            headers = {name.decode().lower(): value.decode() for name, value in head.headers}
            answers.append(Answer(head.status_code, headers, body))
            pending = parser.trailing_data[0]
            parser = None
        elif isinstance(event, h11.ConnectionClosed):
            return answers
    return answers


def ask(url: str, sent: bytes | Iterable[bytes], most: int = 1, method: str = "GET") -> list[Answer]:
    """The answers to some bytes on a connection of their own."""
    with connect(url) as connection:
        for part in [sent] if isinstance(sent, bytes) else sent:
            try:
                connection.sendall(part)
            except (BrokenPipeError, ConnectionResetError):
                break  # it has seen enough
        return read_answers(connection, most, method)


def post(path: str, body: bytes, *headers: str, content_type: str = "application/json") -> bytes:
    """A well-formed POST of any body."""
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
