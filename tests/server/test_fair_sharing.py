"""Fair sharing of a server by API keys: whose requests go first is asserted on the order of answers, never on time."""

import asyncio

import httpx
import pytest
from asgi_client import serving
from fake_engine import FakeEngine
from server_process import REAL, ServerProcess

from rustvllm.server.flags.settings import ServerSettings
from rustvllm.tenant import Tenant

FLOOD, SMALL = "key-of-the-flood", "key-of-the-small"
NUM_FLOOD = 40


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


async def test_a_request_is_charged_to_its_key_and_its_user():
    engine = FakeEngine()
    settings = ServerSettings(api_keys=("one", "two"), key_weights=(3,))
    async with serving(engine, settings) as (client, _):
        for key, fields in (("one", {}), ("two", {"user": "x"}), ("one", {"user": "x"}), ("one", {"user": ""})):
            body = {"prompt": "a", "max_tokens": 1, **fields}
            assert (await client.post("/v1/completions", json=body, headers=bearer(key))).status_code == 200
        wrong = {"prompt": "a", "max_tokens": 1, "user": 5}
        assert (await client.post("/v1/completions", json=wrong, headers=bearer("one"))).status_code == 400
    payers = [request.tenant.payer for request in engine.seen]
    assert payers == [
        tenant.payer
        for tenant in (Tenant("one", weight=3), Tenant("two", "x"), Tenant("one", "x", 3), Tenant("one", weight=3))
    ]
    assert len({tenant for tenant, _, _ in payers}) == 2
    assert payers[1][1] == payers[2][1] != 0


async def test_without_keys_there_is_one_bucket_and_its_users():
    engine = FakeEngine()
    async with serving(engine) as (client, _):
        for fields in ({}, {"user": "x"}):
            await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, **fields})
    assert engine.seen[0].tenant is None
    assert engine.seen[1].tenant.payer == (0, Tenant(user="x").payer[1], 1)


@pytest.mark.parametrize(("policy", "may_be_passed_by"), [("fair", 3), ("fcfs", NUM_FLOOD)])
async def test_a_flood_of_one_key_holds_up_no_other(policy, may_be_passed_by, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(f"{FLOOD}\n{SMALL}\n")
    command = [
        *REAL, "--executor", "sim", "--port", "0", "--sim-step-time", "4", "--max-num-seqs", "1", "--max-num-batched-tokens", "64",
        "--scheduling-policy", policy, "--api-key-file", str(keys),
    ]  # fmt: skip
    body = {"prompt": [5] * 40, "max_tokens": 16, "ignore_eos": True}
    ended = []

    async def ask(client, name, key, user):
        answer = await client.post("/v1/completions", json={**body, "user": user}, headers=bearer(key))
        assert answer.status_code == 200, answer.text
        ended.append(name)

    with ServerProcess(command) as server:
        server.wait_until_ready()
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=httpx.Limits()) as client:
            flood = [asyncio.create_task(ask(client, "flood", FLOOD, str(number))) for number in range(NUM_FLOOD)]
            while (load := (await client.get("/load", headers=bearer(FLOOD))).json())["num_waiting"] < NUM_FLOOD // 2:
                assert len(ended) + load["num_waiting"] <= NUM_FLOOD
            num_before = NUM_FLOOD - load["num_waiting"]
            await ask(client, "small", SMALL, "")
            num_passed = ended.index("small") - num_before
            assert (await client.get("/v1/models", headers=bearer("another"))).status_code == 401
            await asyncio.gather(*flood)
    assert len(ended) == NUM_FLOOD + 1
    assert num_passed <= may_be_passed_by
    assert policy == "fair" or ended[-1] == "small", "first come, first served"
