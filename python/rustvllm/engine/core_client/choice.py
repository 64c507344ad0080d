"""Which client stands behind an ``AsyncLLM`` that was given none."""

from collections.abc import Callable

from rustvllm import envs
from rustvllm.config import EngineConfig
from rustvllm.engine.core_client.interface import AsyncEngineClient
from rustvllm.engine.core_client.thread import ThreadClient
from rustvllm.observe.trace.tracer import Tracer


def make_client(
    config: EngineConfig, on_death: Callable[[], None], tracer: Tracer | None = None, *, multiprocess: bool | None
) -> AsyncEngineClient:
    """An engine in a process of its own, or in a thread of this one.

    Args:
        config: What engine.
        on_death: Called when the engine has ended without a shutdown.
        tracer: Takes records of the engine's steps, if it is in this process; another process makes its own.
        multiprocess: None leaves it to ``RUSTVLLM_ENABLE_MULTIPROCESSING``.
    """
    if not (envs.enable_multiprocessing() if multiprocess is None else multiprocess):
        return ThreadClient(config, on_death, tracer)
    from rustvllm.engine.core_client.process import ProcessClient

    return ProcessClient(config, on_death)
