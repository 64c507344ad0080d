"""Under which names the server answers: what a page whose name leads here may not reach, whatever it asks and how."""

import contextlib
import socket
from types import SimpleNamespace

import pytest
from asgi_client import assert_error, serving
from server_process import FAKE, ServerProcess

from rustvllm.server.flags.host_names import host_name, is_among, is_loopback
from rustvllm.server.flags.http_settings import CorsSettings, HttpSettings
from rustvllm.server.flags.settings import ServerSettings
from rustvllm.server.launch.listen import Listener
from rustvllm.server.launch.serve import _with_known_hosts

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "a", "max_tokens": 2}
LOCAL = [
    "localhost",
    "LOCALHOST:1",
    "localhost.",
    "a.b.localhost:80",
    "127.0.0.1",
    "127.9.9.9:80",
    "[::1]",
    "[::1]:8000",
]
FOREIGN = [
    "evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "notlocalhost", "0.0.0.0",
    "10.0.0.1", "[fd00::1]", "localhost@evil.example", "localhost:80@evil.example", "localhost, evil.example",
    "evil.example/localhost", "localhost:80:80", "[", "[::1", "", " ", "127.0.0.1\xe9",
]  # fmt: skip
PATHS = [
    "/health", "/ping", "/version", "/metrics", "/load", "/docs", "/openapi.json", "/dashboard", "/dashboard/",
    "/dashboard/events", "/dashboard/journey?request_id=r", "/v1/models", "/nowhere", "/",
]  # fmt: skip
REQUESTS = [
    *(("GET", path) for path in PATHS),
    ("POST", COMPLETIONS),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("OPTIONS", COMPLETIONS),
    ("HEAD", "/metrics"),
]


async def note_and_pass(request, call_next):
    """The user's middleware: nothing that is refused may reach it."""
    seen_by_middleware.append(request.headers["host"])
    return await call_next(request)


seen_by_middleware: list[str] = []


def restricted(*names: str, **options: object) -> ServerSettings:
    return ServerSettings(http=HttpSettings(allowed_hosts=names, **options))


@pytest.mark.parametrize("header", LOCAL)
def test_names_of_the_loopback(header):
    assert is_loopback(host_name(header))


@pytest.mark.parametrize("header", FOREIGN)
def test_names_that_are_not(header):
    name = host_name(header)
    assert name is None or not is_loopback(name)


def test_patterns():
    assert is_among("a.example.org", ("b", "*.Example.org"))
    assert is_among("example.org", ("EXAMPLE.org.",))
    assert is_among("anything", ("*",))
    for name in ("example.org", "badexample.org", "a.example.org.evil"):
        assert not is_among(name, ("*.example.org", "org"))


@pytest.mark.parametrize(("method", "path"), REQUESTS)
async def test_no_path_answers_under_another_name(method, path):
    page = {"Access-Control-Request-Method": "POST", "Origin": "http://evil.example"}
    cors, middleware = CorsSettings(("*",)), (f"{__name__}.note_and_pass",)
    async with serving(settings=restricted("127.0.0.1", cors=cors, middleware=middleware)) as (client, engine):
        seen_by_middleware.clear()
        answer = await client.request(method, path, headers={**page, "Host": "evil.example:8000"})
        assert answer.status_code == 403
        if method != "HEAD":
            says = ("'evil.example:8000'", "--allowed-hosts", "localhost")
            assert_error(answer, 403, "PermissionDeniedError", says=says)
        assert "access-control-allow-origin" not in answer.headers
        assert engine.seen == seen_by_middleware == []
        answer = await client.post(COMPLETIONS, json=BODY, headers={"Host": "localhost:8000"})
        assert answer.status_code == 200
        assert seen_by_middleware == ["localhost:8000"]


@pytest.mark.parametrize("host", FOREIGN)
async def test_only_names_that_are_local_pass(host):
    async with serving(settings=restricted()) as (client, _):
        answer = await client.get("/metrics", headers={"Host": host.encode("latin-1")})
        assert_error(answer, 403, "PermissionDeniedError", says=(repr(host),))


async def test_named_hosts_and_those_of_the_loopback_pass():
    async with serving(settings=restricted("llm.example.org", "*.example.net")) as (client, _):
        for host in ("llm.example.org", "LLM.example.org:443", "a.example.net", *LOCAL):
            assert (await client.post(COMPLETIONS, json=BODY, headers={"Host": host})).status_code == 200
        for host in ("example.net", "x.llm.example.org"):
            assert (await client.post(COMPLETIONS, json=BODY, headers={"Host": host})).status_code == 403
    async with serving(settings=restricted("*")) as (client, _):
        assert (await client.get("/health", headers={"Host": "any.example"})).status_code == 200


@pytest.mark.parametrize("allowed", [None, ("*",), ("llm.example.org",)])
async def test_the_live_page_stays_this_machines_own_unless_it_is_enabled(allowed):
    host = {"Host": "llm.example.org"}
    for access, status in (("local", 403), ("any", 200)):
        settings = ServerSettings(dashboard=access, http=HttpSettings(allowed_hosts=allowed))
        async with serving(settings=settings) as (client, _):
            assert (await client.get("/health", headers=host)).status_code == 200
            answer = await client.get("/dashboard", headers=host)
            assert answer.status_code == status
            if status == 403:
                assert_error(answer, 403, "PermissionDeniedError", says=("--enable-dashboard", "localhost"))
            assert (await client.get("/dashboard", headers={"Host": "127.0.0.1:8000"})).status_code == 200


@pytest.mark.parametrize(
    ("address", "settings", "expected"),
    [
        ("127.0.0.1", ServerSettings(), ("called",)),
        ("127.0.1.1", ServerSettings(), ("called",)),  # as a name of this machine may lead to
        ("::1", ServerSettings(), ("called",)),
        ("0.0.0.0", ServerSettings(), None),
        ("10.0.0.1", ServerSettings(), None),
        ("/socket", ServerSettings(), None),
        ("127.0.0.1", ServerSettings(api_keys=("k",)), None),
        ("127.0.0.1", restricted("a"), ("a",)),
        ("0.0.0.0", restricted("a"), ("a",)),
        ("/socket", restricted("a"), ("a",)),
    ],
)
def test_where_it_is_restricted(address, settings, expected, tmp_path):
    bound = SimpleNamespace(getsockname=lambda: (address, 8000))
    listener = Listener(bound, "http://x", tmp_path if address == "/socket" else None)
    assert _with_known_hosts(settings, listener, "called").http.allowed_hosts == expected


# -- a server -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server():
    with ServerProcess([*FAKE, "--port", "0", "--allowed-hosts", "llm.example.org"]) as named:
        named.wait_until_ready()
        with ServerProcess([*FAKE, "--port", "0"]) as process:
            process.wait_until_ready()
            process.named = named
            yield process


def status_of(server: ServerProcess, request: bytes) -> tuple[int, bytes]:
    """Status and whole answer to these bytes."""
    host, port = server.url.removeprefix("http://").split(":")
    said = b""
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(request)
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(1 << 16):
                said += piece
    return int(said.split(b" ", 2)[1]), said


@pytest.mark.parametrize(
    ("request_head", "expected"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: evil.example", 403),
        (b"GET /health HTTP/1.1\r\nHost: evil.example", 403),
        (b"GET /health HTTP/1.0\r\nHost: evil.example", 403),
        (b"GET /metrics HTTP/0.9\r\nHost: evil.example", 403),
        (b"GET /metrics HTTP/2.0\r\nHost: evil.example", 403),
        (b"GET http://evil.example/metrics HTTP/1.1\r\nHost: localhost", 403),
        (b"GET http://localhost@evil.example/metrics HTTP/1.1\r\nHost: localhost", 403),
        (b"GET http://evil.example:8000/health HTTP/1.0", 403),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost", 400),
        (b"GET /health HTTP/1.0\r\nHost: localhost\r\nHost: evil.example", 400),
        (b"GET /metrics HTTP/2.0\r\nHost: evil.example\r\nHost: localhost", 400),
        (b"GET http://localhost/health HTTP/1.1\r\nHost: evil.example\r\nHost: localhost", 400),
        (b"GET /v1/models HTTP/2.0", 400),
        (b"GET /v1/models HTTP/1.1", 400),
        (b"GET /v1/models HTTP/1.0", 200),
        (b"GET /v1/models HTTP/1.0\r\nHost: localhost", 200),
        (b"GET http://localhost:1/v1/models HTTP/1.1\r\nHost: evil.example", 200),
        (b"GET http://[::1]:1/v1/models HTTP/1.1\r\nHost: x", 200),
        (b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1:8000", 200),
    ],
)
def test_heads_of_every_form(server, request_head, expected):
    status, said = status_of(server, request_head + b"\r\nConnection: close\r\n\r\n")
    assert status == expected, said
    if expected == 403:
        assert b"--allowed-hosts" in said


def test_a_name_that_was_allowed_passes(server):
    head = b"GET /v1/models HTTP/1.1\r\nHost: llm.example.org\r\nConnection: close\r\n\r\n"
    assert status_of(server.named, head)[0] == 200
    assert status_of(server, head)[0] == 403
