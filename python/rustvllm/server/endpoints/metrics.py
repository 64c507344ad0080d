"""``/metrics``: what the engines have counted, for Prometheus. Any API process answers for all engines."""

import asyncio
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from rustvllm.observe.metrics.prometheus import CONTENT_TYPE, OPENMETRICS_CONTENT_TYPE
from rustvllm.server.state import ServerState

OPENMETRICS: Final = "application/openmetrics-text"


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
    openmetrics = OPENMETRICS in request.headers.get("accept", "")
    text = state.model.prometheus_text.render(engines, adapters, openmetrics=openmetrics)
    return Response(text, headers={"Content-Type": OPENMETRICS_CONTENT_TYPE if openmetrics else CONTENT_TYPE})
