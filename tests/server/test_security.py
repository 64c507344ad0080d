"""What strangers may try: smuggled and broken HTTP, bombs, templates that want out, other tenants' caches, keys."""

import asyncio
import json
import pickle  # noqa: TID251 -- to make what must not be opened
import shutil
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

import httpx
import pytest
from asgi_client import assert_error, client_of, serving
from fake_engine import FakeEngine
from server_process import FAKE, REAL, ServerProcess

from rustvllm import LLM
from rustvllm.cli.main import main
from rustvllm.exceptions import InvalidRequestError, ModelLoadError
from rustvllm.server.app import build_app
from rustvllm.server.http import front_door as middleware
from rustvllm.server.state import ServerSettings, ServerState
from rustvllm.text.chat_renderer import TemplateProcess, probe_order, read_probe, read_text, render_order
from rustvllm.text.chat_template import render_chat

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
GOOD = {"prompt": "abc", "max_tokens": 2}
USER = [{"role": "user", "content": "x"}]
KEYS = ("sk-first-0123456789", "sk-second-0123456789", "sk-of-the-environment", "sk-a-wrong-guess")
HOUR = 3600.0


# -- over the fake engine ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "deflate", "br", "zstd", "gzip, identity", "x" * 5000])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize"])
async def test_compressed_bodies_are_refused_unopened(encoding, path):
    async with serving() as (client, _):
        for content in (b"\x1f\x8b\x08" + bytes(100), json.dumps({**GOOD, "messages": USER}).encode()):
            response = await client.post(path, content=content, headers={**JSON, "Content-Encoding": encoding})
            assert_error(response, 415, "BadRequestError", says=("Content-Encoding", "send the body uncompressed"))
            assert len(response.content) < 500
        headers = {**JSON, "Content-Encoding": "identity"}
        assert (await client.post(COMPLETIONS, content=json.dumps(GOOD), headers=headers)).status_code == 200


async def test_a_request_has_one_host():
    state = ServerState()
    state.set_ready(FakeEngine())
    async with client_of(state) as client:
        for hosts in ([], ["a", "b"], ["a", "a"]):
            request = client.build_request("POST", COMPLETIONS, json=GOOD)
            request.headers = httpx.Headers(
                [(name, value) for name, value in request.headers.multi_items() if name != "host"]
                + [("host", host) for host in hosts]
            )
            assert_error(await client.send(request), 400, "BadRequestError", says=("exactly one Host header",))
        assert (await client.post(COMPLETIONS, json=GOOD)).status_code == 200


async def test_a_client_that_stops_in_the_middle_of_a_body_is_let_go(monkeypatch):
    monkeypatch.setattr(middleware, "BODY_SILENCE_SECONDS", 0.05)

    async def half():
        yield b'{"prompt": "a'
        await asyncio.sleep(HOUR)

    state = ServerState()
    state.set_ready(FakeEngine())
    sent = []

    async def receive(pieces=half()):  # noqa: B008 -- one body, once
        return {"type": "http.request", "body": await anext(pieces), "more_body": True}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": COMPLETIONS, "raw_path": COMPLETIONS.encode(), "query_string": b"",
        "http_version": "1.1", "scheme": "http", "root_path": "", "client": None, "server": None,
        "headers": [(b"host", b"x"), (b"content-type", b"application/json")],
    }  # fmt: skip
    await build_app(state)(scope, receive, send)
    assert sent[0]["status"] == 408
    assert b"received no data of the request's body" in sent[1]["body"]
    assert state.num_open_requests == 0


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt":"a","x":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}",
        b'{"prompt":"a","x":' + b'{"a":' * 1_000_000 + b"1" + b"}" * 1_000_000 + b"}",
        b'{"prompt":"a","x":' + b"9" * 5_000_000 + b"}",
        b'{"prompt":"a","max_tokens":' + b"9" * 4000 + b"}",
        b'{"prompt":"a","temperature":1e' + b"9" * 400 + b"}",
        b'{"prompt":' + b"[1," * 500_000 + b"1" + b"]" * 500_000 + b"}",
        b'{"prompt":"a","bad_words":["' + b"x" * 7_000_000 + b'"]}',
        b'{"prompt":"a","cache_salt":"' + b"x" * 7_000_000 + b'"}',
        b'{"prompt":"a","request_id":"' + b"x" * 7_000_000 + b'"}',
        b'{"prompt":"a","model":"' + b"x" * 7_000_000 + b'"}',
        b'{"prompt":"a","stop_token_ids":[' + b"1," * 2_000_000 + b"-1]}",
        b'{"prompt":"a","n":1000000000000}',
        b'{"prompt":"a","' + b"x" * 7_000_000 + b'":{"__proto__":1,"prompt":',
        b'{"messages":' + b'[{"role":"user","content":' * 100_000 + b"1",
    ],
)  # fmt: skip
async def test_bodies_that_are_bombs_get_a_short_400(content):
    async with serving() as (client, _):
        response = await client.post(COMPLETIONS, content=content, headers=JSON)
        assert response.status_code in (400, 404)
        assert response.json()["error"]["message"]
        assert len(response.content) < 6000
        assert (await client.post(COMPLETIONS, json=GOOD)).status_code == 200


async def get(app, raw_path, **headers):
    """Status and body of a ``GET``, with the path as it came: clients like to tidy it up."""
    said = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        said.append(message)

    path, _, query = raw_path.partition("?")
    scope = {
        "type": "http", "method": "GET", "path": unquote(path), "raw_path": path.encode(),
        "query_string": query.encode(), "http_version": "1.1", "scheme": "http",
        "root_path": "", "client": None, "server": None,
        "headers": [
            (b"host", b"localhost"), *((name.encode(), value.encode("latin-1")) for name, value in headers.items()),
        ],
    }  # fmt: skip
    await app(scope, receive, send)
    return said[0]["status"], b"".join(message.get("body", b"") for message in said[1:])


def app_of(**settings):
    state = ServerState(ServerSettings(**settings))
    state.set_ready(FakeEngine())
    return build_app(state)


@pytest.mark.parametrize(
    "path",
    [
        "/..", "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/..%2f..%2fetc%2fpasswd", "/v1/../v1/models",
        "//v1/models", "/v1/models/../../etc/passwd", "/v1/models/%2e%2e%2fhealth", "/v1/models/..%5c..%5cwindows",
        "/V1/MODELS", "/v1/models/a%00b", "/v1/models%00", "/health%00", "/static/../pyproject.toml",
        "/v1/models;x=1", "/.git/config", "/v1/models/%252e%252e", "/v1/models/file:///etc/passwd", "/v1//models",
        "/docs/../openapi.json", "/v1/models/" + "a" * 60_000,
    ],
)  # fmt: skip
async def test_paths_lead_to_endpoints_or_nowhere(path):
    app = app_of()
    status, body = await get(app, path)
    assert status == 404
    assert len(body) < 700
    assert b"root:" not in body
    assert (await get(app, "/v1/models"))[0] == 200


async def test_a_key_is_needed_for_what_only_looks_like_a_probe():
    key = KEYS[0]
    app = app_of(api_keys=(key,))
    for path in ("/health", "/ping", "/version"):
        assert (await get(app, path))[0] == 200
    for path in (
        "/health/", "//health", "/health%2f..%2fv1/models", "/v1/models?/health", "/HEALTH", "/openapi.json", "/docs",
        "/load", "/metrics", "/v1/models", "/nothing", "/tokenize", "/health/../v1/models",
        "/dashboard/events", "/dashboard/journey", "/dashboard/../v1/models", "/dashboard/x",
    ):  # fmt: skip
        status, body = await get(app, path)
        assert status == 401, path
        if path.startswith("/v1/"):
            assert body == b'{"error":"Unauthorized"}', path
        else:  # open in vLLM
            message = json.loads(body)["error"]
            assert message.startswith("Unauthorized: the API key guards every path"), path
            assert "--api-key-exempt" in message
    for header in (
        "", key, f"Basic {key}", f"Bearer {key}x", f"Bearer {key[:-1]}", "Bearer", "Bearer ", f"Bearer x{key}",
        f"Bearer {key} {key}", f"Bearer {key.upper()}", "Bearer *", "Bearer \x00", f"Bearer {key}\x00", "Bearer \xe9",
    ):  # fmt: skip
        assert await get(app, "/v1/models", authorization=header) == (401, b'{"error":"Unauthorized"}'), header
    assert (await get(app, "/v1/models", authorization=f"bearer {key}"))[0] == 200


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ config.items() }}",
    "{{ self._TemplateReference__context.cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ cycler.__init__.__globals__.os.system('id') }}",
    "{{ joiner.__init__.__globals__.os }}",
    "{{ namespace.__init__.__globals__['sys'].modules }}",
    "{{ ''['__class__']['__mro__'][1]['__subclasses__']() }}",
    "{{ (''|attr('__class__')|attr('__mro__'))[1]|attr('__subclasses__')() }}",
    "{{ ''|attr(['__cl','ass__']|join)|attr('__mro__') }}",
    "{{ messages|map(attribute='__class__.__init__.__globals__')|list }}",
    "{{ [0]|map('attr', '__class__')|list|first|attr('__base__') }}",
    "{{ '{0.__class__.__base__}'.format(1) }}",
    "{{ '{x.__globals__}'.format_map({'x': raise_exception}) }}",
    "{{ '%s'.__mod__.__self__.__class__ }}",
    "{{ raise_exception.__globals__['os'] }}",
    "{{ strftime_now.__code__.co_consts }}",
    "{{ strftime_now.__kwdefaults__.x }}",
    "{% set x = messages.__class__ %}{{ x.__subclasses__() }}",
    "{{ messages.__init__.__func__ }}",
    "{{ loop.__class__ }}{% for m in messages %}{{ loop.__init__.__globals__.os }}{% endfor %}",
    "{% macro m() %}{{ caller }}{% endmacro %}{{ m.__init__.__globals__.os }}",
    "{{ range.__class__.__base__.__subclasses__() }}",
    "{{ (1).real.__class__.__base__.__subclasses__() }}",
    "{{ dict(a=1).__class__.fromkeys.__self__.__base__.__subclasses__() }}",
    "{{ ().__reduce_ex__(2) }}",
    "{% include '/etc/passwd' %}",
    "{% extends '/etc/passwd' %}",
    "{% import '/proc/self/environ' as e %}",
    "{{ messages.clear() }}",
    "{{ messages[0].pop('content') }}",
    "{{ messages[0].setdefault('a', 1) }}",
    "{{ get_flashed_messages.__globals__.__builtins__.open('/etc/passwd').read() }}",
    "{{ url_for.__globals__.current_app.config }}",
    "{{ g.pop.__globals__.__builtins__.__import__('os') }}",
    "{{ request.application.__globals__.__builtins__ }}",
]
BOMBS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10 ** 10 }}",
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{{ '%9999999999d' | format(1) }}",
    "{{ 'a'.ljust(10 ** 9) }}",
    "{{ 'a' * 17000000 }}",
    "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{{ " + "(" * 20000 + ")" * 20000 + " }}",
    "{% if 1 %}" * 5000,
    "{{ a }}" * 100_000,
]


def test_templates_that_want_out_do_not_get_out():
    """Rendered here, in the sandbox alone, so that the process around it cannot hide a hole."""
    tokenizer = SimpleNamespace(chat_template=None, special_tokens_map={})
    for source in ESCAPES:
        messages = [{"role": "user", "content": "x"}]
        try:
            text = render_chat(tokenizer, messages, chat_template=source)
        except InvalidRequestError:
            text = ""
        assert not any(word in text for word in ("class ", "function", "module", "uid=", "root:", "built-in")), source
        assert messages == [{"role": "user", "content": "x"}], source


async def test_a_requests_own_template_is_bounded_and_delays_no_other_request():
    async with serving(settings=ServerSettings(trust_request_chat_template=True)) as (client, engine):
        bombs = [
            asyncio.create_task(client.post(CHAT, json={"messages": USER, "chat_template": bomb}, timeout=60))
            for bomb in BOMBS
        ]
        slowest = 0.0
        while not all(task.done() for task in bombs):
            begin = time.monotonic()
            assert (await client.post(COMPLETIONS, json=GOOD)).status_code == 200
            slowest = max(slowest, time.monotonic() - begin)
            await asyncio.sleep(0.02)
        assert slowest < 2.0, "a template in this process would have held it for longer"
        for bomb, task in zip(BOMBS, bombs, strict=True):
            response = await task
            assert response.status_code == 400, (bomb[:60], response.text[:300])
            assert response.json()["error"]["param"] in ("chat_template", "messages"), response.text
            assert len(response.content) < 2500
        engine.seen.clear()
        template = "{{ bos_token }}{{ messages[0].content }}{{ tools }}{{ extra }}"
        body = {"messages": USER, "chat_template": template, "chat_template_kwargs": {"extra": "é"}, "max_tokens": 1}
        for path in (CHAT, "/tokenize"):
            response = await client.post(path, json=body if path == CHAT else {**body, "max_tokens": None})
            assert response.status_code == 200, response.text
        (request,) = engine.seen
        assert request.prompt == "<s>xNoneé"


def test_a_template_sees_nothing_of_the_servers_environment(monkeypatch):
    monkeypatch.setenv("RUSTVLLM_API_KEY", KEYS[2])
    monkeypatch.setenv("HF_TOKEN", KEYS[2])
    process = TemplateProcess()
    try:
        assert not read_probe(process.ask(probe_order("{{ messages[0].content }}")))
        assert read_text(process.ask(render_order({}, USER, {}))) == "x"
        seen = Path(f"/proc/{process.pid}/environ").read_bytes()
        assert b"PATH=" in seen
        assert KEYS[2].encode() not in seen
    finally:
        process.close()


def test_a_pickle_is_not_opened(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "opened"), "w"))

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 8, "n_embd": 8, "n_layer": 1, '
        '"n_head": 1, "n_positions": 16}'
    )
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin", "tokenizer.pkl"):
        (folder / name).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ModelLoadError, match="safetensors"):
        LLM(str(folder), skip_tokenizer_init=True)
    assert not (tmp_path / "opened").exists()


def test_a_key_is_not_in_help_or_in_a_report(monkeypatch, capsys):
    monkeypatch.setenv("RUSTVLLM_API_KEY", KEYS[2])
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789abcdef")
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    main(["collect-env"])
    with pytest.raises(SystemExit):
        main(["serve", "--api-key", KEYS[0], "--bogus"])
    captured = capsys.readouterr()
    for secret in (*KEYS, "hf_0123456789abcdef"):
        assert secret not in captured.out + captured.err


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="there is no prlimit to bound the open files with")
def test_a_server_without_descriptors_comes_back():
    """Connections are bounded by the limit of open files; one too many is turned away and breaks nothing."""
    with ServerProcess(["prlimit", "--nofile=64:64", *FAKE, "--port", "0"]) as server:
        url = server.wait_until_ready()
        host, port = url.removeprefix("http://").split(":")
        idle = [socket.create_connection((host, int(port)), timeout=10) for _ in range(100)]
        for connection in idle:
            connection.close()
        deadline = time.monotonic() + 20
        while True:
            try:
                assert httpx.post(url + COMPLETIONS, json=GOOD, timeout=10).status_code == 200
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        assert "Traceback" not in server.output


# -- a real server ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server():
    command = [
        *REAL, "--port", "0", "--num-gpu-blocks-override", "512", "--enable-prompt-tokens-details",
        "--api-key", *KEYS[:2], "--uvicorn-log-level", "trace", "--enable-access-log", "--max-body-bytes", "1000000",
    ]  # fmt: skip
    with ServerProcess(command, RUSTVLLM_LOGGING_LEVEL="DEBUG", RUSTVLLM_API_KEY=KEYS[2]) as process:
        process.wait_until_ready()
        yield process


def raw(server, data, *, until=b"", seconds=20.0):
    """What the server answers to these bytes until it closes, or has said ``until``."""
    host, port = server.url.removeprefix("http://").split(":")
    said = b""
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        try:
            connection.sendall(data)
            while not (until and until in said):
                piece = connection.recv(1 << 16)
                if not piece:
                    break
                said += piece
        except ConnectionError:  # closed on us while we were sending: refused
            pass
    return said


def head(*lines, path=COMPLETIONS, method="POST"):
    key = f"Authorization: Bearer {KEYS[0]}"
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", key, *lines, "", ""]).encode()


def ask(server, body, path=COMPLETIONS, key=KEYS[0]):
    return httpx.post(server.url + path, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60)


@pytest.fixture
def unharmed(server):
    """Afterwards the server answers as ever."""
    yield
    assert ask(server, {"prompt": "Once", "max_tokens": 1}).status_code == 200


SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + KEYS[0].encode() + b"\r\n\r\n"


@pytest.mark.parametrize(
    "lines",
    [
        ("Content-Length: 5", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: chunked", "Content-Length: 5"),
        ("Content-Length: 0", "Content-Length: 5"),
        ("Content-Length: 0, 5",),
        ("Content-Length: +0",),
        ("Content-Length: -1",),
        ("Content-Length: 0x0",),
        ("Content-Length: 99999999999999999999",),
        ("Transfer-Encoding : chunked",),
        ("Transfer-Encoding: xchunked",),
        ("Transfer-Encoding: chunked, identity",),
        ("X: a", " folded: b", "Content-Length: 0"),
        ("X Y: a",),
        ("X: a\x00b",),
        ("X: a\rb",),
        (": no name",),
    ],
)
@pytest.mark.usefixtures("unharmed")
def test_ambiguous_requests_are_refused_and_their_rest_is_no_request(server, lines):
    said = raw(server, head("Content-Type: application/json", *lines) + b"0\r\n\r\n" + SMUGGLED)
    assert said.startswith(b"HTTP/1.1 400 "), said[:200]
    assert said.count(b"HTTP/1.1 ") == 1
    assert b"permission" not in said, "the request behind it was answered"


@pytest.mark.usefixtures("unharmed")
def test_pipelined_requests_are_answered_in_order_and_one_at_a_time(server):
    bodies = [json.dumps({"prompt": "Once", "max_tokens": 1 + i, "ignore_eos": True}).encode() for i in range(4)]
    requests = b"".join(
        head("Content-Type: application/json", f"Content-Length: {len(body)}") + body for body in bodies
    )
    said = raw(server, requests + head("Connection: close", method="GET", path="/health"))
    parts = said.split(b"HTTP/1.1 200 OK")[1:]
    assert len(parts) == 5
    counts = [json.loads(part.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] for part in parts[:4]]
    assert counts == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\nHost: x\n\n",
        b"A" * 100_000,
        b"\r\n" * 10 + b"\x00" * 1000,
    ],
)
@pytest.mark.usefixtures("unharmed")
def test_what_is_no_http_is_refused(server, garbage):
    said = raw(server, garbage)
    assert said == b"" or said.startswith(b"HTTP/1.1 4")
    assert b"200 OK" not in said


@pytest.mark.parametrize(
    "bomb",
    [
        b"X: " + b"y" * 1_000_000,
        b"y" * 1_000_000 + b": x",
        b"".join(b"x%d: y\r\n" % i for i in range(20_000)),
        b"X: " + b"y: z\r\nX: " * 100_000,
        b"Cookie: " + b"a=b; " * 200_000,
    ],
)
@pytest.mark.usefixtures("unharmed")
def test_heads_that_are_bombs_are_refused_before_they_end(server, bomb):
    """Whether it ends or goes on for ever: what is too much is refused when it is too much."""
    few_but_many = b"".join(b"x%d: y\r\n" % i for i in range(1000))  # few bytes, many headers: counted at their end
    said = raw(server, head("Content-Length: 0")[:-2] + few_but_many + b"\r\n")
    assert said.startswith(b"HTTP/1.1 431 "), said[:200]
    for start in (b"GET /health HTTP/1.1\r\nHost: x\r\n", head("Content-Length: 0")[:-2]):
        said = raw(server, start + bomb + b"\r\n" * 2)
        assert said == b"" or said.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 ")), said[:200]
        said = raw(server, start + bomb)  # no end at all
        assert said == b"" or said.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 ")), said[:200]
    said = raw(server, b"GET /" + b"a" * 1_000_000)
    assert said == b"" or said.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 414 ", b"HTTP/1.1 400 ")), said[:200]


@pytest.mark.parametrize("tail", [b"5\r\nabc", b"FFFFFFFFFFFFFFFFFFFF\r\n{", b"zz\r\n", b"-5\r\n{\r\n", b"\r\n"])
@pytest.mark.usefixtures("unharmed")
def test_broken_chunks_end_their_connection_alone(server, tail):
    data = head("Content-Type: application/json", "Transfer-Encoding: chunked") + tail + b"\r\n" * 8
    said = raw(server, data, until=b"HTTP/1.1", seconds=10)
    assert said == b"" or said.startswith(b"HTTP/1.1 4"), said


@pytest.mark.usefixtures("unharmed")
def test_bodies_over_the_limit_are_refused_with_and_without_a_length(server):
    said = raw(server, head("Content-Type: application/json", "Content-Length: 9999999999") + b"{", until=b"}}")
    assert said.startswith(b"HTTP/1.1 413 ")
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    said = raw(server, head("Content-Type: application/json", "Transfer-Encoding: chunked") + chunk * 40, until=b"}}")
    assert said.startswith(b"HTTP/1.1 413 ") or said == b""


@pytest.mark.usefixtures("unharmed")
def test_text_of_users_is_never_a_pattern(server):
    """Stop strings and bad words are compared, not matched: what makes a pattern explode is a text like any other."""
    for text in ("(a+)+$", "(.*)*\\1", "[" * 50, "(?:(?:a?){99}){99}", "\\", "a{1,99999}b", "(?P<x>", "^(a|a)*$"):
        begin = time.monotonic()
        for field in ("stop", "bad_words"):
            response = ask(server, {"prompt": "a" * 60, "max_tokens": 8, field: [text], "ignore_eos": True})
            assert response.status_code == 200, response.text
            assert response.json()["usage"]["completion_tokens"] == 8
        assert time.monotonic() - begin < 30
        for field in ("guided_regex", "guided_grammar"):
            assert_error(ask(server, {"prompt": "a", field: text}), 400, "BadRequestError", param=field)
    for stop, limit in ((["x"] * 200_000, "1024"), ("x" * 900_000, "65536")):
        assert_error(ask(server, {"prompt": "a", "stop": stop}), 400, "BadRequestError", param="stop", says=(limit,))


@pytest.mark.usefixtures("unharmed")
def test_no_client_writes_lines_into_the_log_or_into_an_answers_head(server):
    forged = "\nERROR 01-01 00:00:00 [rustvllm] forged\x1b[31m"
    raw(server, head(path="/v1/%0aERROR%20forged%1b[31m", method="GET"), until=b"}}")
    raw(server, head("X-Request-Id: a\tb\x0bERROR forged", "Content-Length: 0"), until=b"}}")
    for extra in (
        {forged: 1},
        {"model": forged},
        {"user": forged},
        {"cache_salt": forged},
        {"truncation_side": forged},
    ):
        assert ask(server, {"prompt": "Once", "max_tokens": 1, **extra}).status_code in (200, 400, 404)
    for request_id in ("a\r\nSet-Cookie: x=1", "a\x00b", "a\x1b[31m", "\u2028"):
        response = ask(server, {"prompt": "Once", "max_tokens": 1, "request_id": request_id})
        assert_error(response, 400, "BadRequestError", param="request_id")
        assert "set-cookie" not in response.headers
    assert not [line for line in server.output.splitlines() if line.startswith("ERROR")]
    assert "\x1b" not in server.output


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_salt_keeps_tenants_apart(server, path):
    text = "Once upon a time there was a fox who lived in the forest and had a secret. " * 4

    def said(salt):
        extra = {} if salt is None else {"cache_salt": salt}
        prompt = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
        answer = ask(server, {**prompt, "max_tokens": 8, "temperature": 0, **extra}, path).json()
        choice = answer["choices"][0]
        details = answer["usage"].get("prompt_tokens_details") or {}
        return choice.get("text") or choice["message"]["content"], details.get("cached_tokens", 0)

    salts = [f"{path[4:6]}-tenant-{name}" for name in "abc"] + [None]
    first = [said(salt) for salt in salts]
    assert [cached for _, cached in first] == [0] * 4, "no client finds what another has computed"
    again = [said(salt) for salt in salts]
    assert all(cached >= 32 for _, cached in again), "each finds its own"
    assert {answer for answer, _ in first + again} == {first[0][0]}, "a salt changes no text"


def test_keys_are_nowhere_but_in_the_servers_own_memory(server):
    """After all of the above and some more, at the most talkative settings."""
    wrong = {"Authorization": f"Bearer {KEYS[3]}"}
    assert httpx.get(server.url + "/v1/models", headers={"Authorization": f"Bearer {KEYS[1]}"}).status_code == 200
    shown = ""
    for method, path, headers in (
        ("GET", "/v1/models", wrong),
        ("POST", COMPLETIONS, wrong),
        ("GET", "/openapi.json", {"Authorization": f"Bearer {KEYS[0]}"}),
        ("GET", "/nothing", {"Authorization": f"Bearer {KEYS[0]}"}),
        ("GET", "/health", {"Authorization": f"Bearer {KEYS[0]}", "X-Request-Id": "x"}),
        ("POST", COMPLETIONS, {"Authorization": f"Bearer {KEYS[0]}", "Content-Type": "text/plain"}),
    ):
        shown += httpx.request(method, server.url + path, headers=headers, timeout=30).text
    with httpx.stream(
        "POST",
        server.url + COMPLETIONS,
        json={"prompt": "Once", "stream": True, "user": "x"},
        headers={"Authorization": f"Bearer {KEYS[0]}"},
    ) as response:
        shown += "".join(response.iter_text())
    children = server.children()
    assert len(children) >= 2
    for child in children:
        shown += " ".join(child.cmdline()) + str(child.environ())
    assert "127.0.0.1" in server.output
    for key in KEYS:
        assert key not in shown
        assert key not in server.output
    assert "Traceback" not in server.output
