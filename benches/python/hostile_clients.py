"""Clients that break the rules of HTTP: they send without reading, or close half of a connection."""

import contextlib
import socket
import time
import urllib.parse
from typing import Any

PIECE = b"x" * (1 << 16)
TOO_LARGE_BYTES = 64 << 20
"""More than the largest allowed body, and more than a socket's buffers hold."""
FLOOD_SECONDS = 3.0
HALF_REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"


def send_before_reading(url: str) -> dict[str, Any]:
    """Send all of a body that is too large, then read: returns the status, or how the connection ended."""
    begin = time.perf_counter()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {TOO_LARGE_BYTES}\r\n\r\n"
    sent = 0
    try:
        with _connection(url) as connection:
            connection.sendall(head.encode())
            while sent < TOO_LARGE_BYTES:
                connection.sendall(PIECE)
                sent += len(PIECE)
            status = connection.recv(1 << 16)[9:12].decode() or "closed"
    except OSError as error:
        status = type(error).__name__
    return {"status": status, "sent_bytes": sent, "answer_ms": round((time.perf_counter() - begin) * 1000, 1)}


def half_close_flood(url: str) -> dict[str, Any]:
    """Open connections as fast as one client can, send half a request over each, and close the sending half."""
    begin = time.perf_counter()
    kept: list[socket.socket] = []
    failures = opened = 0
    while time.perf_counter() - begin < FLOOD_SECONDS:
        try:
            connection = _connection(url)
            kept.append(connection)
            connection.sendall(HALF_REQUEST)
            connection.shutdown(socket.SHUT_WR)
            opened += 1
        except OSError:
            failures += 1
        if len(kept) > 200:
            kept.pop(0).close()
    for connection in kept:
        with contextlib.suppress(OSError):
            connection.close()
    return {"opened": opened, "failures": failures, "answer_ms": round((time.perf_counter() - begin) * 1000, 1)}


def _connection(url: str) -> socket.socket:
    parts = urllib.parse.urlsplit(url)
    return socket.create_connection((parts.hostname or "", parts.port or 80), 30)
