"""``/metrics``: what the engines have counted, for Prometheus. Any API process answers for all engines."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from rustvllm.observe.metrics.prometheus import CONTENT_TYPE, OPENMETRICS_CONTENT_TYPE
from rustvllm.server.state import ServerState

OPENMETRICS: Final = "application/openmetrics-text"


async def metrics(request: Request) -> Response:
    """Metrics in the Prometheus text format, or in OpenMetrics when ``Accept`` asks for it."""
    state: ServerState = request.app.state.server
    engines = await state.model.engine.metrics()
    openmetrics = OPENMETRICS in request.headers.get("accept", "")
    text = state.model.prometheus_text.render(engines, openmetrics=openmetrics)
    return Response(text, headers={"Content-Type": OPENMETRICS_CONTENT_TYPE if openmetrics else CONTENT_TYPE})
