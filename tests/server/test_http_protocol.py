"""Limits of a request's head, with bytes as they come from a socket: whole, in pieces, without an end, too slowly."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

import pytest
import uvicorn

from rustvllm.server.http import limited_protocol as http_protocol
from rustvllm.server.http.limited_protocol import limited_protocol

MAX_HEAD, MAX_HEADERS = 1000, 8
WATCH = b"GET /watch HTTP/1.1\r\n\r\n"
GONE: list[str] = []
"""What /watch heard."""


async def application(scope, receive, send) -> None:
    """Answers with the length of the body; /slow begins an answer before the body is there, /later after a while.

    /watch begins its answer with the whole body there and goes on when the client has gone.
    """
    if scope["path"] == "/later":
        await asyncio.sleep(0.2)
    if scope["path"] == "/slow":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"ab", "more_body": True})
    length = 0
    while True:
        message = await receive()
        length += len(message.get("body", b""))
        if not message.get("more_body"):
            break
    if scope["path"] == "/watch":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"ab", "more_body": True})
        GONE.append((await receive())["type"])
        return
    body = b"cd" if scope["path"] == "/slow" else b"%d" % length
    if scope["path"] != "/slow":
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):
        yield


@pytest.fixture
async def port() -> AsyncIterator[int]:
    config = uvicorn.Config(
        application, http=limited_protocol(MAX_HEAD, MAX_HEADERS), lifespan="off", ws="none", log_config=None, port=0
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 -- it has no signal
        await asyncio.sleep(0.001)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await task


async def talk(port: int, *pieces: bytes) -> bytes:
    """Everything that comes back, to the end of the connection."""
    loop = asyncio.get_running_loop()
    answer = bytearray()

    async def read() -> None:
        with contextlib.suppress(ConnectionResetError):
            while piece := await loop.sock_recv(connection, 65536):
                answer.extend(piece)

    with socket.socket() as connection:
        connection.setblocking(False)
        await loop.sock_connect(connection, ("127.0.0.1", port))
        reading = asyncio.create_task(read())
        with contextlib.suppress(OSError):  # the server may close in the middle
            for piece in pieces:
                await loop.sock_sendall(connection, piece)
                await asyncio.sleep(0.002)
        await asyncio.wait_for(reading, 20)
    return bytes(answer)


def status_and_message(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert b"connection: close" in head
    assert error["code"] == int(head.split()[1])
    return error["code"], error["message"]


def head_of(num_bytes: int, *, close: bool = True) -> bytes:
    """A request whose head, as it is counted, has that many bytes."""
    fixed = b"GET / HTTP/1.1\r\n" + (b"connection: close\r\n" if close else b"")
    counted = len(b"/") + (len(b"connection") + len(b"close") + 4 if close else 0)
    value = b"v" * (num_bytes - counted - len(b"x") - 4)
    return fixed + b"x: " + value + b"\r\n\r\n"


async def test_heads_up_to_the_limit_are_served(port):
    assert (await talk(port, head_of(MAX_HEAD))).startswith(b"HTTP/1.1 200")
    byte_by_byte = [bytes([byte]) for byte in head_of(60)]
    assert (await talk(port, *byte_by_byte)).startswith(b"HTTP/1.1 200")


async def test_a_head_over_the_limit_is_refused(port):
    says = (431, "The head of the request has more than 1000 bytes (--h11-max-incomplete-event-size).")
    assert status_and_message(await talk(port, head_of(MAX_HEAD + 1))) == says
    url = b"GET /" + b"a" * MAX_HEAD + b" HTTP/1.1\r\nconnection: close\r\n\r\n"
    assert status_and_message(await talk(port, url)) == says
    name = b"GET / HTTP/1.1\r\n" + b"n" * MAX_HEAD + b": v\r\n\r\n"
    assert status_and_message(await talk(port, name)) == says


@pytest.mark.parametrize(
    "begin",
    [
        b"GET /",
        b"GET / HTTP/1.1\r\n",
        b"GET / HTTP/1.1\r\nx: ",
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1;",
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx: ",
    ],
)
async def test_what_never_ends_is_refused_soon(port, begin):
    pieces = [b"a" * 100] * 60
    status, _ = status_and_message(await talk(port, begin, *pieces))
    assert status == 431


async def test_many_headers_are_refused(port):
    def request(count: int) -> bytes:
        lines = b"".join(b"h%d: v\r\n" % number for number in range(count - 1))
        return b"GET / HTTP/1.1\r\nconnection: close\r\n" + lines + b"\r\n"

    assert (await talk(port, request(MAX_HEADERS))).startswith(b"HTTP/1.1 200")
    status, message = status_and_message(await talk(port, request(MAX_HEADERS + 1)))
    assert (status, message) == (431, "The request has more than 8 headers (--h11-max-header-count).")


async def test_bodies_have_no_such_limit(port):
    body = b"b" * (MAX_HEAD * 50)
    request = b"POST / HTTP/1.1\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    assert (await talk(port, request, body[:10], body[10:])).endswith(b"50000")
    chunk = b"%x\r\n%b\r\n" % (len(body), body)
    chunked = b"POST / HTTP/1.1\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    assert (await talk(port, chunked, chunk, chunk[:5000], chunk[5000:], b"0\r\n\r\n")).endswith(b"100000")


async def test_each_request_of_a_connection_has_the_whole_limit(port):
    several = [head_of(MAX_HEAD - 100, close=False)] * 5 + [head_of(MAX_HEAD - 100)]
    assert (await talk(port, *several)).count(b"HTTP/1.1 200") == 6
    # Two requests in one piece, the second without an end yet.
    both = head_of(900, close=False) + head_of(900)
    assert (await talk(port, both[:1500], both[1500:])).count(b"HTTP/1.1 200") == 2


async def test_what_is_no_http_is_refused_in_the_same_form(port):
    status, message = status_and_message(await talk(port, b"\x16\x03\x01 hello\r\n\r\n"))
    assert (status, message) == (400, "Invalid HTTP request received.")


async def test_an_answer_that_has_begun_is_broken_off_without_another_in_it(port):
    request = b"POST /slow HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n"
    answer = await talk(port, request, b"no chunk\r\n")
    assert answer.count(b"HTTP/1.1") == 1
    assert answer.endswith(b"ab")


@pytest.mark.parametrize("begin", [b"", b"GET / HTTP/1.1\r\nx: a"])
async def test_a_head_that_does_not_come_to_its_end_is_given_up(port, begin, monkeypatch):
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.05)
    status, message = status_and_message(await talk(port, begin))
    assert (status, message) == (408, "The head of the request did not arrive within 0.05 seconds.")


async def test_a_head_that_drips_is_given_up_too(port, monkeypatch):
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.1)
    status, _ = status_and_message(await talk(port, b"GET / HTTP/1.1\r\nx: ", *[b"a"] * 400))
    assert status == 408


async def test_half_a_head_behind_a_request_does_not_harm_its_answer(port, monkeypatch):
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.02)
    answer = await talk(port, b"GET /later HTTP/1.1\r\n\r\n", b"GET / HT")
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.count(b"HTTP/1.1 ") == 2
    assert b"HTTP/1.1 408" in answer


async def test_nonsense_behind_a_request_is_no_answer_to_it(port):
    answer = await talk(port, b"GET /later HTTP/1.1\r\n\r\n\x00\x01\r\n\r\n")
    assert b"HTTP/1.1 400" not in answer


@pytest.mark.parametrize("behind", [b"GET / HTTP/1.1\r\n\r\n" * 2, b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\na"])
async def test_an_endpoint_hears_that_the_client_has_gone_whatever_requests_wait_behind(port, behind):
    GONE.clear()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(WATCH + behind)
    async with asyncio.timeout(20):
        assert (await reader.readuntil(b"ab")).startswith(b"HTTP/1.1 200")
        writer.close()
        while not GONE:  # noqa: ASYNC110 -- it has no signal
            await asyncio.sleep(0.001)
    assert GONE == ["http.disconnect"]


async def test_a_broken_body_of_a_request_that_waits_is_no_part_of_the_answer_before_it(port):
    answer = await talk(port, WATCH + b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n", b"no chunk\r\n")
    assert answer.endswith(b"\r\n\r\nab")


async def test_a_slow_body_is_not_given_up(port, monkeypatch):
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST / HTTP/1.1\r\nconnection: close\r\ncontent-length: 3\r\n\r\n")
    for _ in range(3):
        await asyncio.sleep(0.05)
        writer.write(b"a")
    async with asyncio.timeout(20):
        assert (await reader.read()).endswith(b"3")
    writer.close()
