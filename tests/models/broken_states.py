"""A model whose hidden states are not numbers for one token, and what becomes of the requests that have this token."""

import asyncio

import torch

from rustvllm import AsyncEngineArgs, AsyncLLM, PoolingParams

BROKEN = 7
"""The token."""


def break_states(model):
    """A model of transformers, changed in place."""
    with torch.no_grad():
        model.model.embed_tokens.weight[BROKEN] = float("nan")
    return model


def assert_they_fail_alone(folder, says, **options):
    """A request with the token ends with an error that says this, and one next to it gets its vector."""
    args = AsyncEngineArgs(model=folder, **options)

    async def run():
        engine = await asyncio.to_thread(AsyncLLM, args.create_engine_config())

        async def one(name, ids):
            return [each async for each in engine.encode({"prompt_token_ids": ids}, PoolingParams(), name)]

        try:
            return await asyncio.gather(one("bad", [1, 2, BROKEN]), one("good", [1, 2, 3]), return_exceptions=True)
        finally:
            await asyncio.to_thread(engine.shutdown)

    bad, good = asyncio.run(run())
    assert says in str(bad), bad
    assert len(good) == 1, good
