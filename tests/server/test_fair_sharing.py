"""Fair sharing of a server by API keys: whose requests go first is asserted on the order of steps, never on time."""

import asyncio
import re

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


def ids_of_first_steps(lines):
    """Front part of the id of each request, in the order of the steps in which they began."""
    ids = [found[1] for line in lines if (found := re.search(r" step \d+ cmpl-([a-z]+)-\S+ scheduled ", line))]
    return [each for index, each in enumerate(ids) if each not in ids[:index]]


def names(first):
    """``NUM_FLOOD`` different words of small letters."""
    return [f"{first}{chr(97 + number // 26)}{chr(97 + number % 26)}" for number in range(NUM_FLOOD)]


@pytest.mark.parametrize(("policy", "place"), [("fair", 2), ("fcfs", NUM_FLOOD + 1)])
async def test_a_flood_of_one_key_holds_up_no_other(policy, place, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(f"{FLOOD}\n{SMALL}\n")
    command = [
        *REAL, "--executor", "sim", "--port", "0", "--sim-step-time", "40", "--max-num-seqs", "1", "--trace",
        "--scheduling-policy", policy, "--api-key-file", str(keys),
    ]  # fmt: skip

    async def ask(client, name, key, user="", max_tokens=1):
        body = {"prompt": [5] * 40, "max_tokens": max_tokens, "ignore_eos": True, "user": user}
        answer = await client.post("/v1/completions", json=body, headers={**bearer(key), "X-Request-Id": name})
        assert answer.status_code == 200, answer.text

    with ServerProcess(command) as server:
        server.wait_until_ready()
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

            async def until(what, count):
                while (await client.get("/load", headers=bearer(FLOOD))).json()[what] < count:
                    assert not plug.done(), "all were to wait behind it"

            # It has the only seat until all others wait: their order is the scheduler's choice.
            plug = asyncio.create_task(ask(client, "plug", FLOOD, max_tokens=450))
            await until("num_running", 1)
            flood = [asyncio.create_task(ask(client, name, FLOOD, user=name)) for name in names("flood")]
            await until("num_waiting", NUM_FLOOD)
            small = asyncio.create_task(ask(client, "small", SMALL))
            await until("num_waiting", NUM_FLOOD + 1)
            plug.cancel()
            await asyncio.gather(small, *flood)
        # A line may be read after the answer that it tells of.
        server.wait_until(lambda: len(ids_of_first_steps(server.lines)) == NUM_FLOOD + 2)
        began = ids_of_first_steps(server.lines)
    assert sorted(began) == sorted(["plug", "small", *names("flood")])
    assert began.index("small") <= place
    assert policy == "fair" or began[-1] == "small", "first come, first served"
    for secret in (FLOOD, SMALL):
        assert secret not in server.output
