"""Answers that come before a request's body has: they arrive, and what the client goes on sending is bounded."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from certificates import make_certificate
from fake_engine import FakeEngine

from rustvllm.server.app import build_app
from rustvllm.server.flags.http_settings import HttpSettings, TlsSettings
from rustvllm.server.flags.settings import ServerSettings
from rustvllm.server.http import linger
from rustvllm.server.http.limited_protocol import limited_protocol
from rustvllm.server.http.tls import create_ssl_context
from rustvllm.server.state import ServerState

LARGE = 32 << 20
"""More than two sockets keep for a client that does not read."""
LIMIT = 64 << 20
COMPLETIONS = "/v1/completions"
JSON, HOST, KEY, CLOSE = (
    "Content-Type: application/json",
    "Host: localhost",
    "Authorization: Bearer k",
    "Connection: close",
)
BODY = b'{"prompt": "a", "max_tokens": 2}'


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):
        yield


@asynccontextmanager
async def listening(*, max_body_bytes: int = LIMIT, is_ready: bool = True, tls: TlsSettings | None = None):
    """The port of a server that has a key and answers to names of the loopback."""
    http = HttpSettings(allowed_hosts=())
    state = ServerState(ServerSettings(api_keys=("k",), max_body_bytes=max_body_bytes, http=http))
    if is_ready:
        state.set_ready(FakeEngine())
    config = uvicorn.Config(
        build_app(state), http=limited_protocol(8192, 32), lifespan="off", ws="none", log_config=None, port=0
    )
    config.load()
    if tls is not None:
        config.ssl = create_ssl_context(tls)
    server = _Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 -- it has no signal
        await asyncio.sleep(0.001)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    async with asyncio.timeout(20):  # far less than a linger
        await task
    assert state.num_open_requests == 0


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async with listening() as number:
        yield number


def head_of(*lines: str, method: str = "POST", path: str = COMPLETIONS) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode()


def send_all_then_read(port: int, data: bytes, context: ssl.SSLContext | None = None) -> bytes:
    """As a client does that looks for an answer only when it has sent its whole request."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as plain:
        connection = plain if context is None else context.wrap_socket(plain, server_hostname="localhost")
        with connection:
            connection.sendall(data)
            said = b""
            while b"}" not in said and (piece := connection.recv(1 << 16)):
                said += piece
            return said


REFUSED = {
    "400, no JSON": ((HOST, KEY, "Content-Type: text/plain"), 400),
    "401": ((HOST, JSON), 401),
    "403": (("Host: evil.example", KEY, JSON), 403),
    "404": ((HOST, KEY, JSON), 404),
    "405": ((HOST, KEY, JSON), 405),
    "415": ((HOST, KEY, JSON, "Content-Encoding: gzip"), 415),
    "431": ((HOST, KEY, JSON, *(f"X{number}: y" for number in range(40))), 431),
}
PATHS = {"404": "/nowhere", "405": "/v1/models"}


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
@pytest.mark.parametrize("name", REFUSED)
async def test_a_refusal_reaches_a_client_that_sends_everything_first(port, name, connection):
    lines, status = REFUSED[name]
    head = head_of(*lines, f"Connection: {connection}", f"Content-Length: {LARGE}", path=PATHS.get(name, COMPLETIONS))
    said = await asyncio.to_thread(send_all_then_read, port, head + bytes(LARGE))
    assert said.startswith(b"HTTP/1.1 %d " % status), said
    assert b"connection: close" in said


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_so_does_that_of_a_body_over_the_limit(is_chunked):
    length = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {LARGE}"
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (LARGE, bytes(LARGE)) if is_chunked else bytes(LARGE)
    async with listening(max_body_bytes=LIMIT >> 6) as port:
        said = await asyncio.to_thread(send_all_then_read, port, head_of(HOST, KEY, JSON, CLOSE, length) + body)
    assert said.startswith(b"HTTP/1.1 413 "), said
    assert b"--max-body-bytes" in said


async def test_so_does_that_of_a_server_that_loads():
    async with listening(is_ready=False) as port:
        head = head_of(HOST, KEY, JSON, CLOSE, f"Content-Length: {LARGE}")
        said = await asyncio.to_thread(send_all_then_read, port, head + bytes(LARGE))
    assert said.startswith(b"HTTP/1.1 503 "), said


async def test_so_does_that_of_a_broken_chunk(port):
    head = head_of(HOST, KEY, JSON, CLOSE, "Transfer-Encoding: chunked")
    said = await asyncio.to_thread(send_all_then_read, port, head + b"5\r\nabcde\r\nno chunk\r\n" + bytes(LARGE))
    assert said.startswith(b"HTTP/1.1 400 "), said


async def test_so_does_one_over_tls(tmp_path):
    made = make_certificate(tmp_path, "server")
    context = ssl.create_default_context(cafile=made.certfile)
    async with listening(tls=TlsSettings(str(made.certfile), str(made.keyfile))) as port:
        head = head_of(HOST, JSON, CLOSE, f"Content-Length: {LARGE}")
        said = await asyncio.to_thread(send_all_then_read, port, head + bytes(LARGE), context)
    assert said.startswith(b"HTTP/1.1 401 "), said


async def test_a_client_that_drips_is_let_go(port, monkeypatch):
    monkeypatch.setattr(linger, "LINGER_SECONDS", 0.3)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head_of(HOST, JSON, f"Content-Length: {LARGE}"))
    async with asyncio.timeout(20):
        assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 401 ")
        with pytest.raises(ConnectionError):  # noqa: PT012 -- whichever write finds the connection gone
            while True:
                writer.write(b"a")
                await writer.drain()
                await asyncio.sleep(0.01)


async def test_a_client_that_sends_without_end_is_let_go(port, monkeypatch):
    monkeypatch.setattr(linger, "LINGER_BYTES", 1 << 20)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head_of(HOST, JSON, "Content-Length: 1000000000000"))
    num_sent = 0
    async with asyncio.timeout(60):
        assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 401 ")
        with pytest.raises(ConnectionError):  # noqa: PT012 -- whichever write finds the connection gone
            while num_sent < 16 * LARGE:
                writer.write(bytes(1 << 18))
                await writer.drain()
                num_sent += 1 << 18
    assert num_sent < LARGE


async def test_a_stop_waits_for_no_such_client():
    async with listening() as port:  # leaving it stops the server, within less than a linger takes
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head_of(HOST, JSON, f"Content-Length: {LARGE}") + b"a")
        assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 401 ")
    writer.close()


async def test_a_connection_whose_body_was_whole_is_kept(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(20):
        for lines, status in (((), 401), ((KEY,), 200), ((), 401)):
            writer.write(head_of(HOST, JSON, f"Content-Length: {len(BODY)}", *lines) + BODY)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 %d " % status)
            assert b"connection: close" not in head
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: "))
            await reader.readexactly(int(length.split()[1]))
    writer.close()


async def test_a_client_that_asks_first_is_told_to_go_on_or_refused():
    expect = "Expect: 100-continue"
    async with listening(max_body_bytes=100) as port, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head_of(HOST, KEY, JSON, expect, f"Content-Length: {len(BODY)}"))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(BODY)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head_of(HOST, KEY, JSON, expect, "Content-Length: 101"))
        said = await reader.read()  # to the end: the client that was refused must send nothing more
        assert said.startswith(b"HTTP/1.1 413 ")
        assert b"connection: close" in said
        writer.close()
