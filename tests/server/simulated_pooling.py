"""An application over a simulated engine whose requests end with a vector, and the vectors that it gives."""

from contextlib import asynccontextmanager

import numpy as np
from asgi_client import client_of

from async_streams import until_idle
from rustvllm import AsyncEngineArgs, AsyncLLM
from rustvllm.server.state import ServerState

SIM = {"executor": "sim", "max_num_batched_tokens": 64, "sim_step_time": 0.1}


@asynccontextmanager
async def simulated_server(options, settings=None):
    """A client of the application, and the engine, which has no request left afterwards."""
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**(SIM | options)))
    state = ServerState(settings)
    state.set_ready(engine)
    try:
        async with client_of(state) as client:
            yield client, engine
        await until_idle(engine)
    finally:
        engine.shutdown()
        state.close()


def simulated(ids, width):
    """What the simulation gives for a prompt, float32 ``[width]``; see ``executor/sim.py``."""
    return np.sin((1.0 + ids[-1] + 0.1 * len(ids)) * np.arange(1, width + 1)).astype(np.float32)
