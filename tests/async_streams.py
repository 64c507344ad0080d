"""What tests of ``AsyncLLM`` share: parameters, reading a stream to its end, waiting for a state."""

import asyncio

from rustvllm import SamplingParams
from rustvllm.sampling_params import RequestOutputKind

GREEDY = SamplingParams(temperature=0, max_tokens=4)
DELTA = GREEDY.clone(output_kind=RequestOutputKind.DELTA)
LONG = DELTA.clone(max_tokens=60, ignore_eos=True)


async def collect(engine, prompt, params, request_id, **options):
    return [output async for output in engine.generate(prompt, params, request_id, **options)]


async def until(condition, seconds=5.0):
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 -- what is waited for happens in another thread
            await asyncio.sleep(0.005)


def is_idle(engine):
    stats = engine.stats()
    return stats["num_running"] == stats["num_waiting"] == stats["kv_cache_usage"] == 0


async def until_idle(engine, seconds=20.0):
    """Waits until the engine has no request left: what was aborted ends with the next step. Returns its statistics."""
    async with asyncio.timeout(seconds):
        while True:
            stats = await engine.current_stats()
            if stats["num_running"] == stats["num_waiting"] == 0:
                return stats
            await asyncio.sleep(0.005)
