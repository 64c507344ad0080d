"""What stands behind a body or stands twice must not be taken for what the head said. Over a socket, byte by byte."""

import json
import socket

import pytest
from server_process import FAKE, ServerProcess

KEY = "sk-0123456789"
BODY = json.dumps({"prompt": "a", "max_tokens": 2}).encode()


@pytest.fixture(scope="module")
def server():
    command = [*FAKE, "--port", "0", "--api-key", KEY, "--enable-request-id-headers"]
    with ServerProcess(command) as process:
        process.wait_until_ready()
        yield process


def ask(server: ServerProcess, *lines: str, trailers: str = "") -> bytes:
    """The answer to a chunked completion request with these headers, and these trailers behind its body."""
    host, port = server.url.removeprefix("http://").split(":")
    head = [
        "POST /v1/completions HTTP/1.1", "Connection: close", "Content-Type: application/json",
        "Transfer-Encoding: chunked", *lines, "", "",
    ]  # fmt: skip
    chunks = b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(BODY), BODY, trailers.encode())
    said = b""
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall("\r\n".join(head).encode() + chunks)
        while piece := connection.recv(1 << 16):
            said += piece
    return said


HOST, AUTHORIZATION = "Host: x", f"Authorization: Bearer {KEY}"


def test_a_key_in_a_trailer_opens_nothing(server):
    assert ask(server, HOST, AUTHORIZATION).startswith(b"HTTP/1.1 200 ")
    assert ask(server, HOST, trailers=f"{AUTHORIZATION}\r\n").startswith(b"HTTP/1.1 401 ")
    wrong = "Authorization: Bearer wrong"
    assert ask(server, HOST, wrong, trailers=f"{AUTHORIZATION}\r\n").startswith(b"HTTP/1.1 401 ")
    assert ask(server, HOST, AUTHORIZATION, trailers=f"{wrong}\r\n").startswith(b"HTTP/1.1 200 ")


def test_a_host_in_a_trailer_is_none(server):
    assert ask(server, AUTHORIZATION, trailers="Host: x\r\n").startswith(b"HTTP/1.1 400 ")
    assert ask(server, HOST, AUTHORIZATION, trailers="Host: y\r\n").startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "trailer",
    [
        "X-Request-Id: late",
        "Content-Type: text/plain",
        "Content-Encoding: gzip",
        "Expect: 100-continue",
        "X: y\r\n" * 500,
    ],
)
def test_no_other_trailer_counts(server, trailer):
    said = ask(server, HOST, AUTHORIZATION, trailers=f"{trailer.rstrip()}\r\n")
    assert said.startswith(b"HTTP/1.1 200 "), said
    assert b"x-request-id: late" not in said


def test_two_authorizations_are_refused(server):
    for wrong in ("Authorization: Bearer wrong", AUTHORIZATION):
        for lines in ((AUTHORIZATION, wrong), (wrong, AUTHORIZATION)):
            said = ask(server, HOST, *lines)
            assert said.startswith(b"HTTP/1.1 400 "), said
            assert b"one Authorization header" in said


@pytest.mark.parametrize(
    "lines",
    [
        (HOST, f"Authorization : Bearer {KEY}"),
        (HOST, f" Authorization: Bearer {KEY}"),
        (HOST, f"Authorization:\r\n Bearer {KEY}"),
        (f" {HOST}", AUTHORIZATION),
        (HOST, AUTHORIZATION, "Content-Length: 5"),
    ],
)
def test_headers_of_a_doubtful_form_are_refused(server, lines):
    said = ask(server, *lines)
    assert said.startswith(b"HTTP/1.1 400 "), said
    assert said.count(b"HTTP/1.1 ") == 1


def test_a_length_in_a_trailer_ends_nothing_early(server):
    said = ask(server, HOST, AUTHORIZATION, trailers="Content-Length: 5\r\n")
    assert said.count(b"HTTP/1.1 ") == 1
    assert said.split(b" ", 2)[1] in (b"200", b"400")
