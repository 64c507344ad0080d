"""Pauses outlive the engines that were paused: those that take their places are paused before they get a request."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from rustvllm import AsyncEngineArgs, AsyncLLM, SamplingParams
from rustvllm.engine.core_client.process import ProcessClient
from rustvllm.engine.core_client.remote import RemoteClient
from rustvllm.exceptions import EngineDeadError

PARAMS = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.0)
Start = Callable[[], ProcessClient]
Connect = Callable[..., AsyncLLM]


@pytest.fixture
def engines() -> Iterator[list[AsyncLLM]]:
    """What :func:`start` and :func:`connect` have made."""
    made: list[AsyncLLM] = []
    yield made
    for engine in reversed(made):
        engine.shutdown()


@pytest.fixture
def start(engines: list[AsyncLLM]) -> Start:
    """Starts an engine in a process of its own."""

    def begin() -> ProcessClient:
        args = AsyncEngineArgs(executor="sim", num_gpu_blocks_override=200, sim_step_time=2.0)
        engines.append(AsyncLLM(args.create_engine_config(), multiprocess=True))
        client = engines[-1]._client
        assert isinstance(client, ProcessClient)
        return client

    return begin


@pytest.fixture
def connect(engines: list[AsyncLLM]) -> Connect:
    """Makes a front end of engines."""

    def begin(*clients: ProcessClient) -> AsyncLLM:
        addresses = [client._address for client in clients]
        engines.append(AsyncLLM(engines[0].config, client=RemoteClient(addresses, None, 10.0)))
        return engines[-1]

    return begin


async def kill(client: ProcessClient, *fronts: AsyncLLM, rank: int = 0) -> None:
    os.kill(client.pid, signal.SIGKILL)
    for front in fronts:
        while front.health()[rank].death is None:  # noqa: ASYNC110 -- another process does it
            await asyncio.sleep(0.01)


async def replace(front: AsyncLLM, rank: int, client: ProcessClient) -> None:
    """What a server does when its launcher has started another engine."""
    assert isinstance(front._client, RemoteClient)
    addresses = list(front._client._addresses)
    addresses[rank] = client._address
    front._client._addresses = tuple(addresses)
    await asyncio.to_thread(front.reconnect, rank, 10.0)


def ask(front: AsyncLLM, name: str) -> "asyncio.Task[int]":
    async def num_tokens() -> int:
        outputs = [output async for output in front.generate("Once", PARAMS, name)]
        return len(outputs[-1].outputs[0].token_ids)

    return asyncio.create_task(num_tokens())


async def test_the_engine_in_the_place_of_a_paused_one_is_paused(start: Start, connect: Connect) -> None:
    first = start()
    pauser, other, late = (connect(first) for _ in range(3))
    await pauser.pause_generation(mode="keep")
    await asyncio.sleep(0.5)  # a heartbeat tells the others
    await kill(first, pauser, other, late)
    second = start()
    await replace(other, 0, second)
    waits = ask(other, "a")
    await replace(pauser, 0, second)
    await asyncio.sleep(0.3)
    assert not waits.done()
    assert (await pauser.is_paused(), await other.is_paused()) == (True, True)
    await pauser.resume_generation()
    assert await waits == 3
    await replace(late, 0, second)
    assert not await late.is_paused(), "what was asked since then counts"
    assert await ask(late, "b") == 3


async def test_a_pause_is_kept_by_who_asked_for_it_just_before_the_end(start: Start, connect: Connect) -> None:
    first = start()
    front = connect(first)
    await front.pause_generation()
    await kill(first, front)
    second = start()
    await replace(front, 0, second)
    assert await front.is_paused()
    await front.resume_generation()
    await kill(second, front)
    await replace(front, 0, start())
    assert not await front.is_paused()
    assert await ask(front, "a") == 3


async def test_a_dead_engine_is_passed_over_and_the_one_in_its_place_is_asked(start: Start, connect: Connect) -> None:
    first, second = start(), start()
    front = connect(first, second)
    await kill(first, front)
    await front.pause_generation()
    assert await front.is_paused()
    assert await front.reset_prefix_cache()
    third = start()
    await replace(front, 0, third)
    assert await connect(third).is_paused()
    await kill(third, front)
    await front.resume_generation()
    fourth = start()
    await replace(front, 0, fourth)
    assert not await connect(fourth).is_paused()
    assert [await ask(front, str(index)) for index in range(4)] == [3] * 4
    await kill(second, front, rank=1)
    await kill(fourth, front)
    for call in (front.pause_generation, front.resume_generation, front.is_paused, front.reset_prefix_cache):
        with pytest.raises(EngineDeadError, match="no engine is alive"):
            await call()
