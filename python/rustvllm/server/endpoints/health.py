"""``/health``, ``/ping``, ``/version`` and ``/load``: what probes and load balancers ask."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import rustvllm
from rustvllm.server.errors import status_response
from rustvllm.server.state import ServerState


async def health(request: Request) -> Response:
    """200 when requests are served; else 503: ``loading``, ``stopping``, ``stalled``, ``restarting`` or ``dead``."""
    state: ServerState = request.app.state.server
    return status_response(*state.health())


async def ping(request: Request) -> Response:
    """The same as ``/health``, under the name that some platforms ask for."""
    return await health(request)


async def version() -> dict[str, str]:
    """The package's version."""
    return {"version": rustvllm.__version__}


async def load(request: Request) -> dict[str, Any]:
    """Open generating requests of all API processes (``server_load``), and the engines' counters."""
    state: ServerState = request.app.state.server
    return {"server_load": state.load.total, **await state.model.engine.current_stats()}
