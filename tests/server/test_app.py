"""Around the endpoints: health, loading, stopping, keys, models, versions."""

import asyncio
import time

import pytest
from asgi_client import assert_error, client_of, events_of, serving
from fake_engine import FakeEngine

import rustvllm
from rustvllm.server.state import ServerSettings, ServerState, ServerStatus

GOOD = {"prompt": "good", "max_tokens": 2}


async def test_while_loading_health_says_so_and_the_rest_asks_to_come_back():
    state = ServerState()
    async with client_of(state) as client:
        for path in ("/health", "/ping"):
            response = await client.get(path)
            assert (response.status_code, response.json()) == (503, {"status": "loading"})
        for response in (
            await client.post("/v1/completions", json=GOOD),
            await client.get("/v1/models"),
            await client.get("/load"),
            await client.get("/v1/nothing"),
        ):
            assert_error(response, 503, "ServiceUnavailableError", says=("loading",))
            assert int(response.headers["retry-after"]) >= 1
        assert (await client.get("/version")).json() == {"version": rustvllm.__version__}
        state.set_ready(FakeEngine())
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert (await client.get("/ping")).status_code == (await client.post("/ping")).status_code == 200
        assert (await client.post("/v1/completions", json=GOOD)).status_code == 200
        state.status = ServerStatus.STOPPING
        assert (await client.get("/health")).json() == {"status": "stopping"}
        assert_error(
            await client.post("/v1/completions", json=GOOD), 503, "ServiceUnavailableError", says=("stopping",)
        )


async def test_a_dead_engine_is_known_to_health_and_to_requests():
    async with serving() as (client, engine):
        engine.errored = True
        response = await client.get("/health")
        assert (response.status_code, response.json()["status"]) == (503, "dead")
        for stream in (False, True):
            dead = await client.post("/v1/completions", json={**GOOD, "stream": stream})
            assert_error(dead, 500, "InternalServerError", says=("died",))


@pytest.mark.parametrize("age", ["heartbeat_age", "step_age"])
async def test_an_engine_without_a_sign_of_life_is_stalled_until_it_goes_on(age):
    state = ServerState(ServerSettings(stall_timeout=60))
    engine = FakeEngine()
    state.set_ready(engine)
    async with client_of(state) as client:
        setattr(engine, age, 59.9)
        assert (await client.get("/health")).json() == {"status": "ok"}
        setattr(engine, age, 60.5)
        for path in ("/health", "/ping"):
            response = await client.get(path)
            assert response.status_code == 503
            body = response.json()
            assert (body["status"], body["engine"], body["seconds"]) == ("stalled", 0, 60.5)
            assert "--stall-timeout 60" in body["message"]
        # It is a matter for the load balancer: what is sent all the same is served when the engine goes on.
        assert (await client.post("/v1/completions", json=GOOD)).status_code == 200
        setattr(engine, age, 0.0)
        assert (await client.get("/health")).status_code == 200


async def test_a_stall_timeout_of_0_never_stalls():
    state = ServerState(ServerSettings(stall_timeout=0))
    engine = FakeEngine()
    engine.heartbeat_age = 1e9
    state.set_ready(engine)
    async with client_of(state) as client:
        assert (await client.get("/health")).json() == {"status": "ok"}


async def test_an_engine_that_is_started_again_is_worth_waiting_for():
    state = ServerState(ServerSettings(restart_engine=True))
    engine = FakeEngine()
    state.set_ready(engine)
    async with client_of(state) as client:
        engine.errored = True
        response = await client.get("/health")
        assert (response.status_code, response.json()["status"]) == (503, "restarting")
        refused = await client.post("/v1/completions", json=GOOD)
        assert_error(refused, 503, "ServiceUnavailableError", says=("starting it again",))
        assert int(refused.headers["retry-after"]) >= 1
        assert (await client.get("/health")).json() == {"status": "restarting"}
        engine.errored = False
        state.status = ServerStatus.READY
        assert (await client.post("/v1/completions", json=GOOD)).status_code == 200


async def test_an_engine_that_dies_under_a_stream_ends_it_with_an_error_event():
    engine = FakeEngine()
    engine.fail_at = 3
    async with serving(engine) as (client, _):
        events = events_of(await client.post("/v1/completions", json={"prompt": "a", "stream": True}))
    assert [set(event) == {"error"} for event in events] == [False, False, True]
    assert "died" in events[-1]["error"]["message"]


async def test_abort_all_ends_open_answers_with_abort():
    engine = FakeEngine(max_model_len=100_000)
    state = ServerState()
    state.set_ready(engine)
    async with client_of(state) as client:
        body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 99_000, "stream": True}
        chat = {"messages": [{"role": "user", "content": "a"}]}
        answers = asyncio.gather(
            client.post("/v1/completions", json=body), client.post("/v1/chat/completions", json=chat)
        )
        while engine.stats()["num_running"] < 3:  # noqa: ASYNC110 -- the engine does not signal it
            await asyncio.sleep(0.001)
        await state.abort_all()
        streamed, whole = await answers
    reasons = [
        event["choices"][0]["finish_reason"]
        for event in events_of(streamed)
        if event["choices"][0]["finish_reason"] is not None
    ]
    assert reasons == ["abort"] * 4
    assert whole.json()["choices"][0]["finish_reason"] == "abort"
    assert not engine.running


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_request_has_arrived_when_its_head_had(path):
    async with serving() as (client, engine):
        before = time.monotonic_ns()
        body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        assert (await client.post(path, json=body)).status_code == 200
        [request] = engine.seen
    assert before < request.arrival_ns < request.began_ns


async def test_models_lists_every_name():
    async with serving() as (client, _):
        body = (await client.get("/v1/models")).json()
        assert body["object"] == "list"
        assert [card["id"] for card in body["data"]] == ["fake", "alias/fake"]
        card = (await client.get("/v1/models/alias/fake")).json()
    assert {key: card[key] for key in card if key != "created"} == {
        "id": "alias/fake",
        "object": "model",
        "owned_by": "rustvllm",
        "root": "some/fake",
        "parent": None,
        "max_model_len": 256,
        "permission": [],
    }


async def test_keys_are_asked_for_everywhere_but_at_the_probes():
    async with serving(settings=ServerSettings(api_keys=("first", "second"))) as (client, _):
        for headers in (
            {},
            {"Authorization": "first"},
            {"Authorization": "Basic first"},
            {"Authorization": "Bearer third"},
            {"Authorization": "Bearer "},
            {"Authorization": "Bearer first second"},
        ):
            for response in (
                await client.post("/v1/completions", json=GOOD, headers=headers),
                await client.get("/load", headers=headers),
                await client.get("/openapi.json", headers=headers),
                await client.get("/v1/nothing", headers=headers),
            ):
                assert response.status_code == 401
                assert list(response.json()) == ["error"]
                assert response.json()["error"].startswith("Unauthorized")
        for key in ("first", "second"):
            for scheme in ("Bearer", "bearer"):
                fine = await client.post("/v1/completions", json=GOOD, headers={"Authorization": f"{scheme} {key}"})
                assert fine.status_code == 200
        for path in ("/health", "/ping", "/version"):
            assert (await client.get(path)).status_code == 200
    assert "first" not in repr(ServerSettings(api_keys=("first",)))


async def test_load_counts_open_requests():
    async with serving() as (client, _):
        assert (await client.get("/load")).json() == {"server_load": 0, "num_running": 0, "num_blocks_used": 0}


async def test_the_documentation_describes_the_requests_and_can_be_off():
    async with serving() as (client, _):
        document = (await client.get("/openapi.json")).json()
        paths, schemas = document["paths"], document["components"]["schemas"]
        body = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": "#/components/schemas/CompletionRequest"}
        schema = schemas["CompletionRequest"]
        assert {"prompt", "max_tokens", "stream"} <= schema["properties"].keys()
        assert len(schema["properties"]["prompt"]["anyOf"]) == 4
        assert "/v1/embeddings" in paths
        assert "/v1/responses" in paths
        assert "/v1/moderations" not in paths
        assert (await client.get("/docs")).status_code == 200
    async with serving(settings=ServerSettings(enable_docs=False)) as (client, _):
        for path in ("/docs", "/openapi.json"):
            assert_error(await client.get(path), 404, "NotFoundError")


@pytest.mark.parametrize(("template", "warns"), [(None, 1), ("{{ messages }}", 0)])
def test_one_warning_for_a_model_without_chat_template(template, warns, monkeypatch):
    said = []
    monkeypatch.setattr("rustvllm.server.state.logger.warning", lambda *args: said.append(args))
    ServerState().set_ready(FakeEngine(chat_template=template))
    assert len(said) == warns
