"""``AsyncLLM.shutdown``: what it waits for, for how long, and what becomes of requests that are left."""

import asyncio
import threading
import time

import pytest

from async_streams import GREEDY, LONG, collect, until
from rustvllm.exceptions import EngineDeadError, InvalidRequestError


@pytest.fixture
def make(make_async):
    return make_async


async def test_shutdown_fails_what_is_open(make, toy_executors):
    engine = make()
    toy_executors[0].step_seconds = 0.02
    task = asyncio.create_task(collect(engine, "a", LONG, "r"))
    await until(lambda: toy_executors[0].steps)
    started = time.monotonic()
    engine.shutdown()
    engine.shutdown()
    assert time.monotonic() - started < 5
    with pytest.raises(EngineDeadError, match="was shut down"):
        await asyncio.wait_for(task, 10)
    with pytest.raises(EngineDeadError, match="was shut down"):
        await engine.add_request("r", "a", GREEDY)
    assert toy_executors[0].was_shut_down
    assert not engine.errored
    assert not any(thread.name == "rustvllm-engine" and thread.is_alive() for thread in threading.enumerate())


async def test_shutdown_from_another_thread(make):
    engine = make()
    stream = await engine.add_request("r", "a", LONG)
    await asyncio.to_thread(engine.shutdown)
    with pytest.raises(EngineDeadError):
        async with asyncio.timeout(2):
            [output async for output in stream]


@pytest.mark.parametrize("in_thread", [False, True])
async def test_a_shutdown_waits_for_requests_as_long_as_it_may(make, toy_executors, in_thread):
    engine = make(max_num_seqs=2)
    toy_executors[0].step_seconds = 0.002
    tasks = [asyncio.create_task(collect(engine, "a", LONG, f"r{i}")) for i in range(4)]
    await until(lambda: toy_executors[0].steps)
    if in_thread:
        ending = asyncio.create_task(asyncio.to_thread(engine.shutdown, 30))
        await until(lambda: engine._is_ending)
        with pytest.raises(EngineDeadError, match="is being shut down; it takes no new requests"):
            await engine.add_request("late", "a", GREEDY)
        await ending
    else:
        engine.shutdown(timeout=30)
    for outputs in await asyncio.wait_for(asyncio.gather(*tasks), 10):
        assert [token_id for output in outputs for token_id in output.outputs[0].token_ids] == list(range(98, 158))
        assert outputs[-1].finished
    with pytest.raises(EngineDeadError, match="was shut down"):
        await engine.add_request("r", "a", GREEDY)


async def test_a_shutdown_fails_what_has_not_ended_in_its_time(make, toy_executors):
    engine = make()
    toy_executors[0].gate.clear()
    task = asyncio.create_task(collect(engine, "a", LONG, "r"))
    await until(lambda: toy_executors[0].steps)
    engine.shutdown(timeout=0.05)
    with pytest.raises(EngineDeadError, match="was shut down"):
        await asyncio.wait_for(task, 10)
    engine.shutdown(timeout=30)  # again: nothing is left to wait for


def test_a_shutdown_after_its_loop_has_ended_waits_for_no_reader(make):
    engine = make()
    asyncio.run(collect(engine, "a", GREEDY, "r"))
    engine.shutdown(timeout=30)


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), True, "1"])
def test_a_shutdown_in_no_time_is_refused_and_ends_nothing(make, timeout):
    engine = make()
    with pytest.raises(InvalidRequestError, match="timeout must be"):
        engine.shutdown(timeout=timeout)
    assert asyncio.run(collect(engine, "a", GREEDY, "r"))[-1].finished


async def test_shutdown_does_not_wait_for_a_hung_step(make, toy_executors):
    engine = make()
    toy_executors[0].gate.clear()
    await engine.add_request("r", "a", LONG)
    await until(lambda: toy_executors[0].steps)
    await asyncio.to_thread(engine.shutdown)
    assert not toy_executors[0].gate.is_set(), "the step hangs still"
