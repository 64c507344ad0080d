"""What stands around the endpoints: CORS, request ids, keys, the user's middleware, the logs. In this process."""

import json
import logging
import textwrap

import httpx
import pytest
from asgi_client import assert_error, client_of, events_of, serving
from fake_engine import FakeEngine, expected_text

from rustvllm.exceptions import ConfigError
from rustvllm.logger import FIELDS
from rustvllm.server.flags.http_settings import CorsSettings, HttpSettings
from rustvllm.server.flags.log_args import RequestLogSettings
from rustvllm.server.schemas.protocol import CompletionRequest
from rustvllm.server.state import ServerSettings, ServerState

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"prompt": "a", "max_tokens": 4}
PAGE = {"Origin": "https://page.example"}
PREFLIGHT = {**PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


def with_http(**options: object) -> ServerSettings:
    return ServerSettings(http=HttpSettings(**options))


@pytest.fixture
def logged(caplog, monkeypatch):
    """The tree's records; it does not propagate to where caplog listens."""
    root = logging.getLogger("rustvllm")
    if caplog.handler not in root.handlers:
        monkeypatch.setattr(root, "handlers", [*root.handlers, caplog.handler])
    caplog.handler.setLevel(logging.DEBUG)
    return caplog


# -- CORS -------------------------------------------------------------------------------------------------------------


async def answers_of_every_kind(client: httpx.AsyncClient, engine: FakeEngine, **options: object):
    """An answer, a stream, a 400, a 401, a 404, a 405, and an unforeseen 500."""
    key = {"Authorization": "Bearer k", **PAGE}
    yield 200, await client.post(COMPLETIONS, json=BODY, headers=key)
    yield 200, await client.post(COMPLETIONS, json={**BODY, "stream": True}, headers=key)
    yield 400, await client.post(COMPLETIONS, json={**BODY, "max_tokens": -1}, headers=key)
    yield 401, await client.post(COMPLETIONS, json=BODY, headers=PAGE)
    yield 404, await client.get("/nowhere", headers=key)
    yield 405, await client.get(COMPLETIONS, headers=key)
    yield 413, await client.post(COMPLETIONS, content=b"x" * 10_001, headers=key)
    engine.refuse = RuntimeError("this was not foreseen")
    yield 500, await client.post(COMPLETIONS, json=BODY, headers=key)
    engine.refuse = None


async def test_every_answer_may_be_read_by_pages_and_has_its_id():
    http = HttpSettings(cors=CorsSettings(("https://page.example",)), request_id_headers=True)
    settings = ServerSettings(api_keys=("k",), http=http, max_body_bytes=10_000)
    async with serving(settings=settings, raise_unforeseen=False) as (client, engine):
        ids = set()
        async for status, answer in answers_of_every_kind(client, engine):
            assert answer.status_code == status, answer.text
            assert answer.headers["access-control-allow-origin"] == "https://page.example"
            assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
            ids.add(answer.headers["x-request-id"])
        assert len(ids) == 8


async def test_no_origin_by_default_and_any_on_request():
    async with serving() as (client, _):
        answer = await client.post(COMPLETIONS, json=BODY, headers=PAGE)
        assert answer.status_code == 200
        refused = await client.options(COMPLETIONS, headers=PREFLIGHT)
        assert_error(refused, 405, "MethodNotAllowedError")
        for response in (answer, refused):
            assert not any(name.startswith("access-control") for name in response.headers)
    async with serving(settings=with_http(cors=CorsSettings(("*",)))) as (client, _):
        answer = await client.post(COMPLETIONS, json=BODY, headers=PAGE)
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in answer.headers


async def test_another_origin_than_allowed_gets_no_permission():
    async with serving(settings=with_http(cors=CorsSettings(("https://other.example",)))) as (client, _):
        answer = await client.post(COMPLETIONS, json=BODY, headers=PAGE)
        assert answer.status_code == 200
        assert "access-control-allow-origin" not in answer.headers
        assert (await client.options(COMPLETIONS, headers=PREFLIGHT)).status_code == 400


async def test_a_preflight_needs_no_key_and_no_model():
    http = HttpSettings(cors=CorsSettings(("*",)))
    state = ServerState(ServerSettings(api_keys=("k",), http=http))  # loading
    async with client_of(state) as client:
        answer = await client.options(COMPLETIONS, headers=PREFLIGHT)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-headers"] == "authorization"
        assert "POST" in answer.headers["access-control-allow-methods"]
        # Without what makes it one, OPTIONS is a request as any other.
        assert (await client.options(COMPLETIONS)).status_code == 401


async def test_methods_headers_and_credentials_as_told():
    cors = CorsSettings(("https://page.example",), ("GET",), ("X-Own",), credentials=True)
    async with serving(settings=with_http(cors=cors)) as (client, _):
        assert (await client.options(COMPLETIONS, headers=PREFLIGHT)).status_code == 400
        fine = {**PAGE, "Access-Control-Request-Method": "GET", "Access-Control-Request-Headers": "x-own"}
        answer = await client.options("/v1/models", headers=fine)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-credentials"] == "true"


async def test_pages_of_others_may_not_read_the_dashboard():
    async with serving(settings=with_http(cors=CorsSettings(("*",)))) as (client, _):
        for path in ("/dashboard", "/dashboard/data"):
            answer = await client.get(path, headers=PAGE)
            assert "access-control-allow-origin" not in answer.headers
            assert (await client.options(path, headers=PREFLIGHT)).status_code != 200


# -- request ids ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_the_id_of_the_header_is_that_of_the_answer(stream):
    async with serving(settings=with_http(request_id_headers=True)) as (client, _):

        async def ids(body: dict[str, object], **headers: str) -> tuple[str, str]:
            answer = await client.post(COMPLETIONS, json={**BODY, **body, "stream": stream}, headers=headers)
            return answer.headers["x-request-id"], (events_of(answer)[0] if stream else answer.json())["id"]

        assert await ids({}, **{"X-Request-Id": "mine"}) == ("mine", "cmpl-mine")
        assert await ids({"request_id": "field"}) == ("field", "cmpl-field")
        assert await ids({"request_id": "field"}, **{"X-Request-Id": "mine"}) == ("mine", "cmpl-mine")
        header, answer = await ids({})
        assert answer == f"cmpl-{header}"
        assert len(header) == 32


async def test_an_id_that_cannot_be_used_is_not_sent_back():
    async with serving(settings=with_http(request_id_headers=True)) as (client, _):
        answer = await client.post(COMPLETIONS, json=BODY, headers={"X-Request-Id": "x" * 257})
        assert answer.status_code == 400
        assert len(answer.headers["x-request-id"]) == 32
        answer = await client.post(COMPLETIONS, json={**BODY, "request_id": "π"})
        assert answer.headers["x-request-id"] == "\\u03c0"
        assert answer.json()["id"] == "cmpl-π"


async def test_no_id_header_unless_asked_for():
    async with serving() as (client, _):
        answer = await client.post(COMPLETIONS, json=BODY, headers={"X-Request-Id": "mine"})
        assert "x-request-id" not in answer.headers
        assert answer.json()["id"] == "cmpl-mine"


# -- keys -------------------------------------------------------------------------------------------------------------


async def test_a_path_may_be_exempt_from_the_key():
    settings = ServerSettings(api_keys=("k",), http=HttpSettings(keyless_paths=("/load",)))
    async with serving(settings=settings) as (client, _):
        assert (await client.get("/load")).status_code == 200
        for path in ("/load/", "/loads", "/v1/models"):
            assert (await client.get(path)).status_code == 401
        for path in ("/health", "/ping", "/version"):
            assert (await client.get(path)).status_code == 200


async def test_a_key_may_have_any_letter():
    async with serving(settings=ServerSettings(api_keys=("schlüssel",))) as (client, _):
        fine = {b"Authorization": "Bearer schlüssel".encode()}
        assert (await client.get("/v1/models", headers=fine)).status_code == 200
        for wrong in ("schlussel", "", "schlüsse", "schlüssell"):
            answer = await client.get("/v1/models", headers={b"Authorization": f"Bearer {wrong}".encode()})
            assert answer.status_code == 401


# -- the user's middleware --------------------------------------------------------------------------------------------

MIDDLEWARE = """
from starlette.middleware.base import BaseHTTPMiddleware


class Plain:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        async def adding(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-plain", b"yes")]
            elif b'"text":"' in message.get("body", b""):
                message["body"] = message["body"].replace(b'"text":"', b'"text":"+')
            await send(message)

        await self.app(scope, receive, adding)


async def function(request, call_next):
    response = await call_next(request)
    response.headers["x-order"] = "function"
    return response


class Based(BaseHTTPMiddleware):
    async def dispatch(self, request, call_next):
        response = await call_next(request)
        response.headers["x-order"] = response.headers.get("x-order", "") + ",based"
        return response


def not_async(request, call_next):
    return None


number = 5
raise_on_import = False
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module with middleware, in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "middleware_of_a_test.py").write_text(MIDDLEWARE, encoding="utf-8")
    (tmp_path / "broken_middleware_of_a_test.py").write_text("1 / 0", encoding="utf-8")
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    return "middleware_of_a_test"


@pytest.mark.parametrize("names", [("Plain",), ("function", "Based"), ("Plain", "function", "Based")])
async def test_middleware_sees_every_answer_and_every_piece_of_a_stream(module, names):
    settings = with_http(middleware=tuple(f"{module}.{name}" for name in names))
    async with serving(settings=settings) as (client, engine):
        whole = await client.post(COMPLETIONS, json=BODY)
        engine.step_seconds = 0.001
        streamed = await client.post(COMPLETIONS, json={**BODY, "stream": True, "n": 2, "temperature": 1})
        for answer in (whole, streamed):
            assert (answer.headers.get("x-plain") == "yes") is ("Plain" in names)
            assert answer.headers.get("x-order") == (None if "Based" not in names else "function,based")
        mark = "+" if "Plain" in names else ""
        text = expected_text(2, 4)
        assert whole.json()["choices"][0]["text"] == mark + text
        pieces = ["", ""]
        for event in events_of(streamed):
            for choice in event["choices"]:
                pieces[choice["index"]] += choice["text"]
        assert [piece.replace(mark or " ", "") for piece in pieces] == [text, expected_text(2, 4, 1)]
        assert pieces[0].count("+") >= len(mark)
        assert (await client.get("/nowhere")).status_code == 404


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("no_such_module_here.Name", "cannot be imported: ModuleNotFoundError"),
        ("broken_middleware_of_a_test.Name", "cannot be imported: ZeroDivisionError"),
        ("middleware_of_a_test.Missing", "the module middleware_of_a_test has no 'Missing'"),
        ("middleware_of_a_test.number", "must name a class .* it is int"),
        ("middleware_of_a_test.not_async", "or a coroutine function"),
    ],
)
async def test_middleware_that_cannot_be_used(module, path, says):
    with pytest.raises(ConfigError, match=says):
        async with client_of(ServerState(with_http(middleware=(path,)))):
            pass


# -- logs -------------------------------------------------------------------------------------------------------------


async def test_the_access_log_has_a_line_per_request_without_the_query(logged):
    settings = ServerSettings(enable_access_log=True, http=HttpSettings(quiet_paths=("/health",)))
    async with serving(settings=settings) as (client, _):
        await client.post(COMPLETIONS, json={**BODY, "stream": True}, headers={"X-Request-Id": "mine"})
        await client.get("/v1/models?api_key=hush")
        await client.get("/health")
        await client.get("/no%0awhere")
    records = [record for record in logged.records if record.name == "rustvllm.access"]
    lines = [record.getMessage() for record in records]
    assert len(lines) == 3
    assert '"POST /v1/completions HTTP/1.1" 200' in lines[0]
    assert lines[0].endswith(" ms mine")
    assert '"GET /v1/models HTTP/1.1" 200' in lines[1]
    assert '"GET /no%0awhere HTTP/1.1" 404' in lines[2]
    assert "hush" not in "".join(lines)
    fields = getattr(records[0], FIELDS)
    assert (fields["method"], fields["path"], fields["status"]) == ("POST", COMPLETIONS, 200)
    assert fields["request_id"] == "mine"
    assert fields["milliseconds"] > 0


async def test_no_access_log_unless_asked_for(logged):
    async with serving() as (client, _):
        await client.get("/v1/models")
    assert not [record for record in logged.records if record.name == "rustvllm.access"]


def lines_of_requests(logged) -> list[str]:
    name = "rustvllm.server.http.request_log"
    return [record.getMessage() for record in logged.records if record.name == name]


async def test_requests_are_logged_without_their_texts(logged):
    logged.set_level(logging.INFO, "rustvllm")
    settings = ServerSettings(request_log=RequestLogSettings(requests=True))
    async with serving(settings=settings) as (client, _):
        await client.post(COMPLETIONS, json={**BODY, "prompt": ["hush", "b"], "request_id": "r", "top_k": 3})
    (line,) = lines_of_requests(logged)
    assert line == "received request cmpl-r: prompts of 5, 2 tokens, SamplingParams(top_k=3, max_tokens=4)"


async def test_prompts_are_logged_at_level_debug_and_cut(logged):
    logged.set_level(logging.DEBUG, "rustvllm")
    settings = ServerSettings(request_log=RequestLogSettings(requests=True, max_len=3))
    async with serving(settings=settings) as (client, _):
        body = {**BODY, "prompt": "a prompt\nof lines", "request_id": "r"}
        await client.post(COMPLETIONS, json=body)
        await client.post(COMPLETIONS, json={**BODY, "prompt": [5, 6, 7, 8]})
    lines = lines_of_requests(logged)
    assert lines[1] == "request cmpl-r, prompt 0: 'a p' and 14 more"
    assert lines[3].endswith("prompt 0: [5, 6, 7] and 1 more")


@pytest.mark.parametrize("stream", [False, True])
async def test_outputs_are_logged_whole_also_of_streams(logged, stream):
    logged.set_level(logging.INFO, "rustvllm")
    settings = ServerSettings(request_log=RequestLogSettings(requests=True, outputs=True))
    async with serving(settings=settings) as (client, _):
        body = {**BODY, "prompt": ["a", "ab"], "n": 2, "temperature": 1, "stream": stream, "request_id": "r"}
        answer = await client.post(COMPLETIONS, json=body)
        assert answer.status_code == 200
    expected = {
        f"answer of request cmpl-r, prompt {prompt}, sample {sample}, length: {expected_text(2 + prompt, 4, sample)!r}"
        for prompt in range(2)
        for sample in range(2)
    }
    assert set(lines_of_requests(logged)[1:]) == expected


async def test_requests_are_not_logged_by_default(logged):
    async with serving() as (client, _):
        await client.post(COMPLETIONS, json=BODY)
    assert lines_of_requests(logged) == []


# -- how answers look -------------------------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_role_of_the_answer(stream):
    async with serving(settings=ServerSettings(response_role="model")) as (client, _):

        async def role(**body: object) -> str:
            answer = await client.post(CHAT, json={"messages": MESSAGES, "max_tokens": 2, "stream": stream, **body})
            assert answer.status_code == 200, answer.text
            if stream:
                return events_of(answer)[0]["choices"][0]["delta"]["role"]
            return answer.json()["choices"][0]["message"]["role"]

        assert await role() == "model"
        assert await role(add_generation_prompt=False) == "user"
        begun = [*MESSAGES, {"role": "assistant", "content": "well"}]
        assert await role(messages=begun, continue_final_message=True, add_generation_prompt=False) == "assistant"
        assert await role(messages=begun, continue_final_message=True) == "assistant"


@pytest.mark.parametrize(
    ("server", "request_says", "expected"),
    [(True, None, True), (True, False, False), (False, None, None), (False, True, True)],
)
def test_the_server_may_show_tokens_as_ids_unless_a_request_says_otherwise(server, request_says, expected):
    request = CompletionRequest(prompt="a", return_tokens_as_token_ids=request_says)
    ServerSettings(return_tokens_as_token_ids=server).complete(request)
    assert request.return_tokens_as_token_ids is expected


@pytest.mark.parametrize("seconds", [0.01, 0])
async def test_a_silent_stream_sends_comments_as_often_as_told(seconds):
    engine = FakeEngine(step_seconds=0.1)
    async with serving(engine, ServerSettings(sse_keep_alive_interval=seconds)) as (client, _):
        answer = await client.post(COMPLETIONS, json={**BODY, "stream": True})
    assert (": waiting\n\n" in answer.text) is (seconds > 0)
    assert answer.text.count("data: {") == 4


async def test_a_template_has_the_servers_variables_unless_a_request_has_its_own():
    template = "{{ mood }} {{ pace }}{% for m in messages %}{% endfor %}"
    settings = ServerSettings(chat_template=template, default_chat_template_kwargs={"mood": "calm", "pace": 1})
    async with serving(settings=settings) as (client, engine):
        body = {"messages": MESSAGES, "max_tokens": 1}
        await client.post(CHAT, json=body)
        await client.post(CHAT, json={**body, "chat_template_kwargs": {"mood": "wild"}})
    prompts = [bytes(request.prompt_token_ids.tolist()).decode() for request in engine.seen]
    assert prompts == ["calm 1", "wild 1"]


async def test_the_effort_of_a_request_wins_over_the_servers_variables():
    template = "{{ reasoning_effort }} {{ enable_thinking }}{% for m in messages %}{% endfor %}"
    variables = {"reasoning_effort": "low", "enable_thinking": True}
    settings = ServerSettings(chat_template=template, default_chat_template_kwargs=variables)
    async with serving(settings=settings) as (client, engine):
        body = {"messages": MESSAGES, "max_tokens": 1}
        for fields in (
            {},
            {"reasoning_effort": "none"},
            {"reasoning_effort": "high"},
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": "so"}},
        ):
            await client.post(CHAT, json={**body, **fields})
            counted = (await client.post("/tokenize", json={"messages": MESSAGES, **fields})).json()
            assert counted["tokens"] == engine.seen[-1].prompt_token_ids.tolist()
    prompts = [bytes(request.prompt_token_ids.tolist()).decode() for request in engine.seen]
    assert prompts == ["low True", "none False", "high True", "none so"]


WALKS = textwrap.dedent("""\
    {%- for m in messages -%}
    {%- if m['content'] is string -%}<{{ m['content'] }}>
    {%- else -%}{%- for part in m['content'] -%}[{{ part['text'] }}]{%- endfor -%}{%- endif -%}
    {%- endfor -%}""")
PLAIN = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("template", "content_format", "content", "prompt"),
    [
        (WALKS, "auto", "hi", "[hi]"),
        (WALKS, "auto", PARTS, "[a][b]"),
        (WALKS, "string", PARTS, "<a\nb>"),
        (WALKS, "openai", "hi", "[hi]"),
        (PLAIN, "auto", PARTS, "<a\nb>"),
        (PLAIN, "auto", "hi", "<hi>"),
        (PLAIN, "openai", "hi", "<[{'type': 'text', 'text': 'hi'}]>"),
    ],
)
async def test_a_template_gets_contents_in_the_form_that_it_expects(template, content_format, content, prompt):
    settings = ServerSettings(chat_template=template, chat_template_content_format=content_format)
    async with serving(settings=settings) as (client, engine):
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        assert (await client.post(CHAT, json=body)).status_code == 200
        assert bytes(engine.seen[0].prompt_token_ids.tolist()).decode() == prompt


def test_json_of_an_access_line_is_one_line():
    from rustvllm.logger import _JsonFormatter

    record = logging.LogRecord("rustvllm.access", logging.INFO, __file__, 1, "a\nb %s", ("c",), None)
    setattr(record, FIELDS, {"status": 200, "path": "/x?api_key=hush-hush"})
    line = _JsonFormatter().format(record)
    assert "\n" not in line
    assert json.loads(line)["message"] == "a\nb c"
    assert json.loads(line)["path"] == "/x?api_key=***"
