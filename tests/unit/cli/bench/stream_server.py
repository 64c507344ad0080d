"""A server of ready answers, one thread per connection, for measurements of streams that are whole or broken."""

import json
import socketserver
import threading
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
USAGE = {"prompt_tokens": 5, "completion_tokens": 6}


def event(value: Any) -> bytes:
    """One event; text stands for itself."""
    text = value if isinstance(value, str) else json.dumps(value)
    return f"data: {text}\n\n".encode()


def text_event(text: str) -> bytes:
    """A chunk with a text."""
    return event({"choices": [{"index": 0, "text": text, "finish_reason": None}]})


WHOLE = (
    HEAD
    + text_event("a")
    + b": keep-alive\n\n"
    + text_event("b")
    + event({"choices": [], "usage": USAGE})
    + event("[DONE]")
)
MODELS = json.dumps({"data": [{"id": "ready-made"}]}).encode()


class StreamServer(socketserver.ThreadingTCPServer):
    """Answers ``/v1/models`` properly and everything else with the next of ``answers``, the last one for ever.

    Attributes:
        requests: Head and body of each request for an answer.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, *answers: bytes) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = list(answers)
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        lines = []
        while (line := self.rfile.readline().decode()) not in ("", "\r\n"):
            lines.append(line)
        if not lines:  # a connection that was only tried
            return
        if lines[0].startswith("GET /v1/models"):
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(MODELS)}\r\nConnection: close\r\n\r\n"
            self.wfile.write(head.encode() + MODELS)
            return
        length = next(int(line.split(":")[1]) for line in lines if line.lower().startswith("content-length:"))
        body = json.loads(self.rfile.read(length))
        with self.server.lock:
            self.server.requests.append(("".join(lines), body))
            answer = self.server.answers.pop(0) if len(self.server.answers) > 1 else self.server.answers[0]
        self.wfile.write(answer)
