"""Pauses of an ``AsyncLLM``, as vLLM's ``pause_generation`` has them: who ends, who waits, who goes on."""

import asyncio

import pytest

from async_streams import GREEDY, LONG, collect, is_idle, until
from rustvllm.exceptions import EngineDeadError, InvalidRequestError, QueueTimeoutError

ALONE = [token_id % 257 for token_id in range(98, 98 + 60)]


@pytest.fixture
def make(make_async):
    return make_async


def ids_of(outputs):
    return [token_id for output in outputs for token_id in output.outputs[0].token_ids]


async def begin(engine, executor, request_id="first"):
    """A long request that has some of its tokens, in an engine whose steps take a moment."""
    executor.step_seconds = 0.005
    stream = await engine.add_request(request_id, "a", LONG)
    return stream, [await anext(stream)]


async def stands_still(executor):
    before = len(executor.steps)
    await asyncio.sleep(0.1)
    return len(executor.steps) == before


async def test_requests_that_are_kept_go_on_where_they_were(make, toy_executors):
    engine = make()
    stream, outputs = await begin(engine, toy_executors[0])
    await engine.pause_generation(mode="keep", clear_cache=False)
    assert await engine.is_paused()
    late = asyncio.ensure_future(collect(engine, "ab", GREEDY, "late"))
    assert await stands_still(toy_executors[0])
    assert (engine.stats()["num_running"], engine.stats()["num_preemptions"]) == (1, 0)
    await engine.pause_generation(mode="keep", clear_cache=False)
    await engine.resume_generation()
    await engine.resume_generation()
    assert not await engine.is_paused()
    outputs += [output async for output in stream]
    assert ids_of(outputs) == ALONE
    assert (await late)[-1].outputs[0].text == "cdef"


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
async def test_kept_requests_are_computed_again_if_the_cache_is_cleared(make, toy_executors, preemption_mode):
    engine = make(preemption_mode=preemption_mode)
    stream, outputs = await begin(engine, toy_executors[0])
    await engine.pause_generation(mode="keep")
    stats = engine.stats()
    assert (stats["num_running"], stats["num_waiting"], stats["kv_cache_usage"]) == (0, 1, 0)
    assert await stands_still(toy_executors[0])
    await engine.resume_generation()
    outputs += [output async for output in stream]
    assert ids_of(outputs) == ALONE


async def test_requests_that_are_waited_for_run_to_their_ends(make, toy_executors):
    engine = make(block_size=4)
    stream, outputs = await begin(engine, toy_executors[0])
    pausing = asyncio.ensure_future(engine.pause_generation(mode="wait"))
    while not await engine.is_paused():  # noqa: ASYNC110 -- what is waited for happens in another thread
        await asyncio.sleep(0)
    late = asyncio.ensure_future(collect(engine, "abcdefghi", GREEDY, "late"))
    outputs += [output async for output in stream]
    assert ids_of(outputs) == ALONE
    await pausing
    assert await stands_still(toy_executors[0])
    assert not late.done()
    await engine.resume_generation()
    last = (await late)[-1]
    assert (last.outputs[0].text, last.num_cached_tokens) == ("jklm", 0)


async def test_all_samples_of_a_request_are_waited_for(make, toy_executors):
    engine = make(max_num_seqs=1)
    toy_executors[0].step_seconds = 0.002
    samples = asyncio.ensure_future(collect(engine, "a", LONG.clone(n=3, temperature=1), "samples"))
    await until(lambda: engine.stats()["num_running"] == 1)
    await engine.pause_generation(mode="wait")
    assert {sample.finish_reason for sample in (await asyncio.wait_for(samples, 10))[-1].outputs} == {"length"}
    assert is_idle(engine)


async def test_a_pause_that_waits_ends_with_the_pause(make, toy_executors):
    engine = make()
    stream, outputs = await begin(engine, toy_executors[0])
    toy_executors[0].gate.clear()
    pausing = asyncio.ensure_future(engine.pause_generation(mode="wait"))
    await asyncio.sleep(0.05)
    toy_executors[0].gate.set()
    await engine.resume_generation()
    await asyncio.wait_for(pausing, 10)
    assert not await engine.is_paused()
    assert ids_of(outputs + [output async for output in stream]) == ALONE


async def test_a_cancelled_pause_remains(make, toy_executors):
    engine = make()
    stream, _ = await begin(engine, toy_executors[0])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.pause_generation(mode="wait"), 0.1)
    async for _ in stream:
        pass
    assert await engine.is_paused()


async def test_requests_are_aborted_by_default(make, toy_executors):
    engine = make(max_num_seqs=1, block_size=4)
    await collect(engine, "abcdefghi", GREEDY, "cached")
    stream, _ = await begin(engine, toy_executors[0])
    waiting = asyncio.ensure_future(collect(engine, "b", LONG.clone(n=2, temperature=1), "waiting"))
    await until(lambda: engine.stats()["num_waiting"] == 2)
    await engine.pause_generation()
    assert {output.outputs[0].finish_reason async for output in stream} == {"abort"}
    assert {sample.finish_reason for sample in (await waiting)[-1].outputs} == {"abort"}
    assert is_idle(engine)
    late = asyncio.ensure_future(collect(engine, "abcdefghi", GREEDY, "late"))
    assert await stands_still(toy_executors[0])
    await engine.resume_generation()
    assert (await late)[-1].num_cached_tokens == 0


async def test_a_paused_engine_ends_what_is_aborted_and_what_waits_too_long(make, toy_executors):
    engine = make(queue_timeout=0.3)
    stream, _ = await begin(engine, toy_executors[0])
    await engine.pause_generation(mode="keep", clear_cache=False)
    late = asyncio.ensure_future(collect(engine, "ab", GREEDY, "late"))
    await engine.abort("first")
    assert [output.outputs[0].finish_reason async for output in stream][-1] == "abort"
    with pytest.raises(QueueTimeoutError):
        await late
    assert is_idle(engine)
    assert await engine.is_paused()


async def test_a_paused_engine_is_well(make, toy_executors):
    engine = make()
    stream, _ = await begin(engine, toy_executors[0])
    await engine.pause_generation(mode="keep", clear_cache=False)
    await engine.check_health()
    engine.health()
    await asyncio.sleep(0.1)
    assert [health.step_age for health in engine.health()] == [pytest.approx(0, abs=0.01)]
    await engine.resume_generation()
    toy_executors[0].gate.clear()
    await asyncio.sleep(0.1)
    engine.health()
    pausing = asyncio.ensure_future(engine.pause_generation(mode="keep", clear_cache=False))
    await asyncio.sleep(0.2)
    assert engine.health()[0].step_age > 0.1, "its step does not end"
    toy_executors[0].gate.set()
    await pausing
    stream.close()


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_nothing_hangs_when_a_paused_engine_is_shut_down(make, toy_executors, mode):
    engine = make()
    stream, _ = await begin(engine, toy_executors[0])
    late = None
    if mode == "wait":
        stream.close()
    await engine.pause_generation(mode=mode, clear_cache=False)
    late = asyncio.ensure_future(collect(engine, "ab", GREEDY, "late"))
    await asyncio.sleep(0.01)
    await asyncio.to_thread(engine.shutdown, 0.1)
    with pytest.raises(EngineDeadError):
        await late
    for call in (engine.pause_generation, engine.resume_generation, engine.is_paused):
        with pytest.raises(EngineDeadError, match="was shut down"):
            await call()


@pytest.mark.parametrize("async_scheduling", [False, True])
async def test_pauses_at_random_lose_no_token(make, toy_executors, async_scheduling):
    engine = make(max_num_seqs=3, async_scheduling=async_scheduling, num_gpu_blocks_override=24)
    toy_executors[0].step_seconds = 0.0005
    running = [asyncio.ensure_future(collect(engine, "a", LONG, f"r{index}")) for index in range(8)]
    for index in range(20):
        await engine.pause_generation(mode="keep", clear_cache=index % 3 == 0)
        await asyncio.sleep(0.001 * (index % 3))
        await engine.resume_generation()
        await asyncio.sleep(0.002)
    for outputs in await asyncio.gather(*running):
        assert ids_of(outputs) == ALONE


async def test_wrong_arguments(make):
    engine = make()
    for mode in ("stop", None, ["keep"], "ABORT"):
        with pytest.raises(InvalidRequestError, match="mode must be one of 'abort', 'wait', 'keep', got"):
            await engine.pause_generation(mode=mode)
    with pytest.raises(InvalidRequestError, match="clear_cache must be True or False"):
        await engine.pause_generation(clear_cache="yes")
    with pytest.raises(TypeError):
        await engine.pause_generation("keep")
    assert not await engine.is_paused()
