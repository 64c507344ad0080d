"""The live page: who may see it, what it is sent with, and what its streams say, to one viewer and to many."""

import argparse
import asyncio
import base64
import hashlib
import json
import re
from contextlib import aclosing

import httpx
import pytest
from asgi_client import assert_error, client_of, serving
from fake_engine import FakeEngine
from server_process import REAL, ServerProcess

from rustvllm.exceptions import EngineDeadError, QueryTimeoutError
from rustvllm.observe.metrics.counters import EngineMetrics
from rustvllm.observe.metrics.history import COLUMNS
from rustvllm.server.dashboard import journey_stream, state_feed
from rustvllm.server.dashboard.journey_stream import journey_events
from rustvllm.server.dashboard.page import page
from rustvllm.server.dashboard.routes import MAX_JOURNEYS
from rustvllm.server.dashboard.state_feed import MAX_VIEWERS, StateFeed
from rustvllm.server.errors import UnavailableError
from rustvllm.server.flags.serve_args import add_cli_args
from rustvllm.server.flags.settings import ServerSettings
from rustvllm.server.state import ServerState, ServerStatus

COUNTERS = ("num_running", "num_waiting", "num_queued", "num_usable_blocks", "num_free_blocks", "num_generation_tokens")
HOST = {"host": "127.0.0.1:8000"}
PATHS = ["/dashboard", "/dashboard/", "/dashboard/events", "/dashboard/history", "/dashboard/journey?request_id=r"]


@pytest.mark.parametrize(
    ("flags", "access"),
    [
        ([], "local"),
        (["--host", "localhost"], "local"),
        (["--host", "::1"], "local"),
        (["--host", "127.0.0.3"], "local"),
        (["--uds", "/tmp/s"], "local"),
        (["--host", "0.0.0.0"], "remote"),
        (["--host", "::"], "remote"),
        (["--host", ""], "remote"),
        (["--host", "example.org"], "remote"),
        (["--host", "0.0.0.0", "--enable-dashboard"], "any"),
        (["--enable-dashboard"], "any"),
        (["--disable-dashboard"], "off"),
        (["--host", "0.0.0.0", "--disable-dashboard"], "off"),
    ],
)
def test_flags_and_address_say_who_sees_it(flags, access):
    parser = add_cli_args(argparse.ArgumentParser())
    assert ServerSettings.from_args(parser.parse_args(flags)).dashboard == access


def test_on_and_off_together_are_an_error(capsys):
    with pytest.raises(SystemExit):
        add_cli_args(argparse.ArgumentParser()).parse_args(["--enable-dashboard", "--disable-dashboard"])
    assert "not allowed with argument" in capsys.readouterr().err


def test_the_page_is_whole_and_its_policy_allows_just_it():
    html, headers = page()
    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    for name in ("script", "style"):
        (content,) = re.findall(rf"<{name}>(.*?)</{name}>", html, re.DOTALL)
        assert len(content) > 1000
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{name}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"
    # Nothing from elsewhere, and nothing that the policy would refuse.
    assert set(re.findall(r"https?://[^\s'\"]+", html)) == {"http://www.w3.org/2000/svg"}
    assert re.findall(r"<[^>]*\s(?:on\w+|style)\s*=", html) == []
    assert re.findall(r"innerHTML|insertAdjacentHTML|document\.write|eval\(", html) == []


async def test_the_page_needs_no_key_and_no_model_and_the_data_do():
    settings = ServerSettings(api_keys=("secret",))
    async with client_of(ServerState(settings)) as client:  # no engine yet
        answer = await client.get("/dashboard", headers=HOST)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert "content-security-policy" in answer.headers
        answer = await client.get("/dashboard/", headers=HOST)
        assert (answer.status_code, answer.headers["location"]) == (307, "../dashboard")
        for path in PATHS[2:]:  # not the page itself
            assert "--api-key-exempt" in (await client.get(path, headers=HOST)).json()["error"]
            answer = await client.get(path, headers={**HOST, "authorization": "Bearer secret"})
            assert_error(answer, 503, "ServiceUnavailableError", says=("still loading",))


@pytest.mark.parametrize("path", PATHS)
async def test_where_it_is_off_it_says_which_flag(path):
    async with serving(settings=ServerSettings(dashboard="remote")) as (client, _):
        answer = await client.get(path, headers=HOST)
        assert_error(answer, 404, "NotFoundError", says=("--enable-dashboard", "other machines"))
    async with serving(settings=ServerSettings(dashboard="off")) as (client, _):
        assert_error(await client.get(path, headers=HOST), 404, "NotFoundError", says=("--disable-dashboard",))


@pytest.mark.parametrize("path", PATHS)
async def test_another_name_or_another_page_is_refused(path):
    async with serving() as (client, engine):
        for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "[", ""):
            answer = await client.get(path, headers={"host": host})
            assert_error(answer, 403, "PermissionDeniedError", says=("localhost", "--enable-dashboard"))
        for origin in ("http://evil.example", "null", "http://127.0.0.1:9999", "file://", "http://["):
            answer = await client.get(path, headers={**HOST, "origin": origin})
            assert_error(answer, 403, "PermissionDeniedError", says=(origin,))
        assert engine.queries == []
    async with serving(settings=ServerSettings(dashboard="any")) as (client, _):
        answer = await client.get("/dashboard", headers={"host": "models.example", "origin": "https://models.example"})
        assert answer.status_code == 200
        answer = await client.get("/dashboard", headers={"host": "models.example", "origin": "https://evil.example"})
        assert answer.status_code == 403


@pytest.mark.parametrize("request_id", ["", "x" * 257, "a%0Ab"])
async def test_a_journey_needs_an_id(request_id):
    async with serving() as (client, engine):
        answer = await client.get(f"/dashboard/journey?request_id={request_id}", headers=HOST)
        assert_error(answer, 400, "BadRequestError", param="request_id", says=("1 to 256 printable characters",))
        assert engine.queries == []


@pytest.mark.parametrize("since", ["", "-1", "x", "1.5", "²", "9" * 16])
async def test_the_hour_needs_the_number_of_a_point(since):
    async with serving() as (client, _):
        answer = await client.get(f"/dashboard/history?since={since}", headers=HOST)
        assert_error(answer, 400, "BadRequestError", param="since", says=("number of a data point",))


async def test_it_is_in_no_schema():
    async with serving() as (client, _):
        assert not [path for path in (await client.get("/openapi.json")).json()["paths"] if "dashboard" in path]


# -- the feed -----------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    """Polls without a pause to speak of."""
    monkeypatch.setattr(state_feed, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(journey_stream, "POLL_SECONDS", 0.01)


def feed_of(engine):
    state = ServerState()
    state.set_ready(engine)
    return StateFeed(state), state


def data_of(event):
    head, data = event.decode().rstrip("\n").split("\n")
    assert head == "event: state"
    return json.loads(data.removeprefix("data: "))


async def test_viewers_share_one_poll_and_without_one_no_engine_is_asked(quick):
    engine = FakeEngine()
    feed, _ = feed_of(engine)
    async with asyncio.timeout(20):
        async with aclosing(feed.watch()) as first, aclosing(feed.watch()) as second, aclosing(feed.watch()) as third:
            await anext(third)  # and reads nothing more
            for _ in range(5):
                assert data_of(await anext(first))["engines"][0]["state"]["stats"]["num_running"] == 0
                await anext(second)
            assert len(engine.queries) <= 3 + 5 * 2, "asked once for all three, however fast each reads"
            assert feed.num_viewers == 3
            seen = [question["since_step"] for _, question in engine.queries]
            assert seen[:3] == [0, 1, 2], "each question is about what is new"
        assert feed.num_viewers == 0
        asked = len(engine.queries)
        await asyncio.sleep(0.1)
        assert len(engine.queries) == asked
        async with aclosing(feed.watch()) as again:
            assert data_of(await anext(again))["server"]["models"] == ["fake", "alias/fake"]


async def test_an_engine_that_is_late_or_dead_is_told_and_comes_back(quick):
    engine = FakeEngine()
    feed, _ = feed_of(engine)
    async with asyncio.timeout(20), aclosing(feed.watch()) as events:
        engine.query_failure = QueryTimeoutError("the engine gave no answer within 2 s")

        async def until(condition):
            while not condition(state := data_of(await anext(events))):
                pass
            return state

        state = await until(lambda state: "error" in state["engines"][0])
        assert "no answer within 2 s" in state["engines"][0]["error"]
        engine.errored = True
        state = await until(lambda state: state["engines"][0]["death"])
        assert (state["server"]["serves"], state["server"]["status"]) == (False, "dead")
        engine.errored, engine.query_failure = False, None
        state = await until(lambda state: "state" in state["engines"][0])
        assert state["server"]["serves"]
        assert state["server"]["task"] == "generate"


async def test_a_state_that_cannot_be_told_ends_the_stream_and_is_logged(quick, caplog):
    engine = FakeEngine()
    engine.query_failure = KeyError("this was not foreseen")
    feed, _ = feed_of(engine)
    async with asyncio.timeout(20), aclosing(feed.watch()) as events:
        assert [event async for event in events] == [b"event: failed\ndata: {}\n\n"]
    assert "this was not foreseen" in caplog.text
    engine.query_failure = None
    async with asyncio.timeout(20), aclosing(feed.watch()) as events:
        assert data_of(await anext(events))["server"]["serves"]


async def test_the_feed_ends_when_the_server_stops_and_has_room_for_so_many(quick):
    feed, state = feed_of(FakeEngine())
    async with asyncio.timeout(20), aclosing(feed.watch()) as events:
        await anext(events)
        for _ in range(MAX_VIEWERS):
            feed.seats.take()
        with pytest.raises(UnavailableError, match="already has its maximum of 64 viewers"):
            feed.seats.take()
        feed.seats.leave()
        feed.seats.take()
        state.status = ServerStatus.STOPPING
        rest = [data_of(event) async for event in events]
        assert rest[-1]["server"]["status"] == "stopping"


async def test_the_hour_is_kept_without_a_viewer_and_asks_no_engine_between_its_steps(monkeypatch):
    monkeypatch.setattr(state_feed, "INTERVAL_SECONDS", 0.01)
    engine = FakeEngine()
    feed, state = feed_of(engine)
    counters = dict.fromkeys(COUNTERS, 0)

    async def metrics():
        counters["num_generation_tokens"] += 5
        if counters["num_generation_tokens"] == 10:
            raise EngineDeadError("for a moment")
        return [EngineMetrics(0, dict(counters))]

    engine.metrics = metrics
    async with asyncio.timeout(20):
        keeper = asyncio.create_task(feed.keep_history())
        while len(points := json.loads(feed.history.as_json(0))["points"]) < 3:  # noqa: ASYNC110 -- sets no event
            await asyncio.sleep(0.005)
        assert all(point["all"][COLUMNS.index("generation")] > 0 for point in points)
        assert engine.queries == []
        state.status = ServerStatus.STOPPING
        await keeper


async def test_a_journey_that_cannot_be_had_says_why(quick, monkeypatch):
    engine = FakeEngine()

    async def told():
        return [event.decode() async for event in journey_events(engine, "r", str)]

    async with asyncio.timeout(20):
        monkeypatch.setattr(journey_stream, "UNSEEN_SECONDS", 0.05)
        assert await told() == ['event: begun\ndata: {"ranks":[0]}\n\n', 'event: end\ndata: {"reason":"unseen"}\n\n']
        while engine.queries[-1] != ("journey", {"do": "end", "request_id": "r"}):  # noqa: ASYNC110 -- on its own
            await asyncio.sleep(0.001)
        engine.query_failure = EngineDeadError("it is gone")
        assert await told() == ['event: end\ndata: {"reason":"it is gone"}\n\n']


# -- over real engines ----------------------------------------------------------------------------------------------

KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def server():
    flags = ["--executor", "sim", "--sim-step-time", "2", "--data-parallel-size", "2", "--port", "0"]
    with ServerProcess([*REAL, *flags], RUSTVLLM_API_KEY="secret") as process:
        process.wait_until_ready()
        yield process


def named_events(response):
    name = ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def test_the_state_of_two_engines_under_load(server):
    body = {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True, "n": 4, "stream": True}
    with httpx.Client(base_url=server.url, headers=KEY, timeout=60) as client:
        streams = [client.stream("POST", "/v1/completions", json=body) for _ in range(2)]
        answers = [stream.__enter__() for stream in streams]
        with client.stream("GET", "/dashboard/events") as response:
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert response.headers["cache-control"] == "no-store"
            for _, state in named_events(response):
                engines = [engine["state"] for engine in state["engines"]]
                rows = [len(engine["requests"]) for engine in engines]
                if rows == [4, 4]:
                    break
        row = engines[0]["requests"][0]
        assert row["num_prompt_tokens"] <= row["num_computed_tokens"] + 1 <= row["num_tokens"] + 1
        assert sum(engines[0]["blocks"]["counts"]) == engines[0]["limits"]["num_blocks"]
        for answer, stream in zip(answers, streams, strict=True):
            answer.close()
            stream.__exit__(None, None, None)
        with client.stream("GET", "/dashboard/events") as response:
            for _, state in named_events(response):
                if not any(engine["state"]["requests"] for engine in state["engines"]):
                    break
        assert state["server"]["serves"]
        assert state["server"]["process"]["memory_bytes"] > 1 << 20
        assert state["server"]["uptime_seconds"] > 0
        pids = {each["process"]["pid"] for each in (state["server"], *(each["state"] for each in state["engines"]))}
        assert len(pids) == 3, "two engines and an API process"
        recent = state["recent"]
        assert set(recent["engines"]) == {"0", "1"}
        row = dict(zip(recent["columns"], recent["all"], strict=True))
        for latency in ("ttft", "itl"):
            assert 0 < row[f"{latency}_p50"] <= row[f"{latency}_p90"] <= row[f"{latency}_p99"] < 60
        assert {"errors", "refused", "preemptions", "aborted"} <= recent["totals"]["all"].keys()
        answer = client.get("/dashboard/history")
        assert answer.headers["cache-control"] == "no-store"
        assert answer.json()["columns"] == recent["columns"]
        # The viewers before this one have gone, and the server knows.
        with client.stream("GET", "/dashboard/events") as response:
            assert any(state["server"]["num_viewers"] == 1 for _, state in named_events(response))


async def test_so_many_journeys_are_watched_and_no_more_however_many_come_at_once(server):
    url = httpx.URL(server.url)
    request = "GET /dashboard/journey?request_id=never HTTP/1.1\r\n"
    request += f"Host: {url.host}:{url.port}\r\nAuthorization: {KEY['Authorization']}\r\n\r\n"

    async def begin():
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(request.encode())
        return int((await reader.readline()).split()[1]), writer

    async def statuses_of(count):
        answers = await asyncio.gather(*(begin() for _ in range(count)))
        for _, writer in answers:
            writer.close()
            await writer.wait_closed()
        return sorted(status for status, _ in answers)

    async with asyncio.timeout(60):
        assert await statuses_of(20) == [200] * MAX_JOURNEYS + [503] * (20 - MAX_JOURNEYS)
        while set(await statuses_of(MAX_JOURNEYS)) != {200}:  # until the server sees that the others have gone
            pass


def test_a_journey_is_streamed_whichever_engine_has_the_request(server):
    with httpx.Client(base_url=server.url, headers=KEY, timeout=60) as client:
        for number in range(2):
            request_id = f"journey{number}"
            with client.stream("GET", f"/dashboard/journey?request_id=cmpl-{request_id}") as response:
                events = named_events(response)
                assert next(events) == ("begun", {"ranks": [0, 1]})
                body = {"prompt": "Once", "max_tokens": 5, "ignore_eos": True, "request_id": request_id}
                answer = client.post("/v1/completions", json=body)
                assert answer.json()["id"] == f"cmpl-{request_id}"
                records = []
                for name, data in events:
                    if name == "end":
                        break
                    records += data["records"]
                assert data == {"reason": "finished"}
            happened = [record["event"] for record in records]
            assert happened[0] == "waiting"
            assert happened[-1] == "finished"
            assert happened.count("scheduled") == happened.count("token") == happened.count("updated") == 5
            assert all(isinstance(record["extras"]["text"], str) for record in records if record["event"] == "token")
