"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from rustvllm.entrypoints.openai.errors import UnknownModelError
from rustvllm.entrypoints.openai.state import ServedModel, ServerState

router = APIRouter()


def _card(model: ServedModel, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "rustvllm",
        "root": model.engine.config.model.model,
        "parent": None,
        "max_model_len": model.max_model_len,
        "permission": [],
    }


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """One card per served name."""
    state: ServerState = request.app.state.server
    state.check_serving()
    return {"object": "list", "data": [_card(state.model, name) for name in state.model.names]}


@router.get("/v1/models/{model_id:path}")
async def get_model(request: Request, model_id: str) -> dict[str, Any]:
    """The card of one name, which may hold slashes."""
    state: ServerState = request.app.state.server
    state.check_serving()
    if not model_id:
        raise UnknownModelError(model_id)
    return _card(state.model, state.model.resolve_name(model_id))
