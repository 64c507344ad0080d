"""``/metrics``: what the engines have counted, for Prometheus. Any API process answers for all engines."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from rustvllm.engine.prometheus_text import CONTENT_TYPE, OPENMETRICS_CONTENT_TYPE
from rustvllm.entrypoints.openai.state import ServerState

router = APIRouter()

_TEXT = {"schema": {"type": "string"}}
_OPENMETRICS = "application/openmetrics-text"


@router.get("/metrics", response_class=PlainTextResponse, responses={200: {"content": {_OPENMETRICS: _TEXT}}})
async def metrics(request: Request) -> Response:
    """Metrics in the Prometheus text format, or in OpenMetrics when ``Accept`` asks for it."""
    state: ServerState = request.app.state.server
    engines = await state.model.engine.metrics()
    openmetrics = _OPENMETRICS in request.headers.get("accept", "")
    text = state.model.prometheus_text.render(engines, openmetrics=openmetrics)
    return Response(text, headers={"Content-Type": OPENMETRICS_CONTENT_TYPE if openmetrics else CONTENT_TYPE})
