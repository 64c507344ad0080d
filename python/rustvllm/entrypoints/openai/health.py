"""``/health``, ``/ping``, ``/version`` and ``/load``: what probes and load balancers ask."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

import rustvllm
from rustvllm.entrypoints.openai.errors import status_response
from rustvllm.entrypoints.openai.state import ServerState

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    """200 when requests are served; else 503: ``loading``, ``stopping``, ``stalled``, ``restarting`` or ``dead``."""
    state: ServerState = request.app.state.server
    return status_response(*state.health())


@router.get("/ping")
@router.post("/ping", include_in_schema=False)
async def ping(request: Request) -> Response:
    """The same as ``/health``, under the name that some platforms ask for."""
    return await health(request)


@router.get("/version")
async def version() -> dict[str, str]:
    """The package's version."""
    return {"version": rustvllm.__version__}


@router.get("/load")
async def load(request: Request) -> dict[str, Any]:
    """Open generating requests of all API processes (``server_load``), and the engines' counters."""
    state: ServerState = request.app.state.server
    state.check_serving()
    return {"server_load": state.load.total, **await state.model.engine.current_stats()}
