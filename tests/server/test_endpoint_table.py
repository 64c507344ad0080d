"""The table of endpoints: what its rows say holds for the routes, the guards and the documents."""

import re
from collections import defaultdict
from pathlib import Path

import httpx
import pytest
from asgi_client import client_of, serving
from fake_engine import FakeEngine
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from rustvllm.server.endpoint_table import ENDPOINTS, UNBUILT_ENDPOINTS
from rustvllm.server.http.endpoint import Endpoint
from rustvllm.server.http.front_door import FrontDoor
from rustvllm.server.state import ServerSettings, ServerState

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
OF_THE_FRAMEWORK = {("GET", "/docs"), ("GET", "/openapi.json")}


def url_of(row: Endpoint) -> str:
    return re.sub(r"\{\w+:path\}", "fake", row.path)


def test_no_method_and_path_has_two_rows():
    rows = [(row.method, row.path) for row in (*ENDPOINTS, *UNBUILT_ENDPOINTS)]
    assert len(rows) > 50
    assert len(rows) == len(set(rows))


def test_the_rows_of_a_path_agree_on_its_guards_and_no_pattern_has_any_of_its_own():
    guards = defaultdict(set)
    for row in ENDPOINTS:
        guards[row.path].add((row.is_open, row.is_watching, row.is_answered_when_full))
        if "{" in row.path:  # the guards look for the path itself
            assert guards[row.path] == {(False, False, False)}
            assert not row.generates
            assert not row.is_direct
    assert len(guards) > 10
    assert {path for path, found in guards.items() if len(found) > 1} == set()


def test_the_page_lists_the_endpoints():
    table = PAGE.read_text(encoding="utf-8").split("\n\n")[2]
    listed = set(re.findall(r"`([A-Z]+) ([^`]+)`", table))
    rows = {(row.method, re.sub(r"\{\w+:path\}", "{id}", row.path)): row for row in ENDPOINTS}
    documented = {name for name, row in rows.items() if row.is_documented}
    assert len(documented) > 10
    assert documented <= listed
    assert listed <= rows.keys() | OF_THE_FRAMEWORK
    keyless = {line for line in table.splitlines() if "needs no key" in line}
    for (method, path), row in rows.items():
        if row.is_documented:
            assert any(f"`{method} {path}`" in line for line in keyless) == row.is_open, path


async def test_a_key_is_asked_for_but_where_a_row_is_open():
    engine = FakeEngine()
    async with serving(engine, ServerSettings(api_keys=("secret",), dashboard="any")) as (client, _):
        for row in (*ENDPOINTS, *UNBUILT_ENDPOINTS):
            refused = (await client.request(row.method, url_of(row))).status_code == 401
            assert refused != row.is_open, row.path


async def test_before_there_is_an_engine_open_rows_are_answered_and_the_others_say_why_not():
    async with client_of(ServerState(ServerSettings(dashboard="any"))) as client:
        for row in ENDPOINTS:
            answer = await client.request(row.method, url_of(row))
            loading = answer.status_code == 503 and "still loading" in answer.text
            assert loading != row.is_open, row.path


async def test_every_row_is_routed():
    async with serving(settings=ServerSettings(dashboard="any")) as (client, _):
        for row in ENDPOINTS:
            if not row.is_watching:  # it would go on
                answer = await client.request(row.method, url_of(row))
                expected = (404,) if "{response_id" in row.path else (200, 307, 400)  # none is stored
                assert answer.status_code in expected, row.path


@pytest.mark.parametrize("is_open", [False, True])
async def test_the_front_door_asks_the_row(is_open):
    async def answer(request: Request) -> Response:
        return PlainTextResponse("inside")

    async def app(scope, receive, send):
        await (await answer(Request(scope)))(scope, receive, send)

    row = Endpoint("GET", "/new", answer, is_open=is_open)
    door = FrontDoor(app, ServerState(ServerSettings(api_keys=("secret",))), [row])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(door), base_url="http://server") as client:
        assert (await client.get("/new")).status_code == (200 if is_open else 401)
        assert (await client.get("/other")).status_code == 401


async def test_what_a_row_says_generates_is_counted_as_load():
    state = ServerState()
    state.set_ready(FakeEngine())
    seen = []

    async def app(scope, receive, send):
        seen.append((scope["method"], scope["path"], state.load.total))
        await PlainTextResponse("")(scope, receive, send)

    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(FrontDoor(app, state, ENDPOINTS)), base_url="http://server"
    ) as client:
        for row in ENDPOINTS:
            await client.request(row.method, url_of(row))
    assert state.load.total == 0
    generating = {(method, path) for method, path, load in seen if load}
    version_1 = ("completions", "chat/completions", "messages", "responses", "embeddings", "score", "rerank")
    paths = {*(f"/v1/{name}" for name in version_1), "/v2/rerank", "/classify", "/score", "/rerank"}
    assert generating == {("POST", path) for path in paths}
