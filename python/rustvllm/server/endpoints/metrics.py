"""``/metrics``: what the engines have counted, for Prometheus. Any API process answers for all engines."""

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request
from starlette.responses import Response

from rustvllm.exceptions import EngineDeadError, QueryError
from rustvllm.observe.metrics.prometheus import CONTENT_TYPE, OPENMETRICS_CONTENT_TYPE
from rustvllm.server.state import ServerState

if TYPE_CHECKING:
    from rustvllm.engine.async_llm import AsyncLLM

OPENMETRICS: Final = "application/openmetrics-text"


RANKS_SECONDS: Final = 0.5
"""For an engine to say how its ranks are."""


async def metrics(request: Request) -> Response:
    """Metrics in the Prometheus text format, or in OpenMetrics when ``Accept`` asks for it."""
    state: ServerState = request.app.state.server
    engine = state.model.engine
    engines = await engine.metrics()
    adapters = {}
    if engine.config.lora is not None:
        ranks = [counted.engine for counted in engines]
        live = await asyncio.gather(*(engine.live_adapters(rank) for rank in ranks))
        adapters = {rank: names for rank, names in zip(ranks, live, strict=True) if names is not None}
    states = {}
    if engine.config.parallel.num_ranks > 1:
        numbers = [counted.engine for counted in engines]
        told = await asyncio.gather(*(_rank_states(engine, number) for number in numbers))
        states = {number: each for number, each in zip(numbers, told, strict=True) if each is not None}
    openmetrics = OPENMETRICS in request.headers.get("accept", "")
    text = state.model.prometheus_text.render(engines, adapters, states, openmetrics=openmetrics)
    return Response(text, headers={"Content-Type": OPENMETRICS_CONTENT_TYPE if openmetrics else CONTENT_TYPE})


async def _rank_states(engine: "AsyncLLM", number: int) -> list[dict[str, Any]] | None:
    """How each rank of an engine is (``RankView``); None: the engine does not say in time."""
    try:
        answer = await engine.query("ranks", rank=number, seconds=RANKS_SECONDS)
    except (QueryError, EngineDeadError):
        return None
    states: list[dict[str, Any]] = json.loads(answer)["ranks"]
    return states
