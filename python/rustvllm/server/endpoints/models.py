"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse

from rustvllm.server.state import ServedModel, ServerState


def _card(model: ServedModel, name: str) -> dict[str, Any]:
    loaded = model.adapters.get(name)
    adapter = None if loaded is None else loaded.request
    merged = model.engine.config.load.merge_lora
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "rustvllm",
        "root": model.engine.config.model.model if adapter is None else adapter.lora_path,
        "parent": None if adapter is None else adapter.base_model_name or model.names[0],
        "max_model_len": model.max_model_len,
        "permission": [],
        **({"merged_adapters": list(merged)} if merged else {}),
    }


async def list_models(request: Request) -> dict[str, Any]:
    """One card for each name of the model, then one for each adapter."""
    state: ServerState = request.app.state.server
    await state.model.refresh_adapters()
    return {
        "object": "list",
        "data": [_card(state.model, name) for name in (*state.model.names, *state.model.adapters)],
    }


async def get_model(request: Request, model_id: str) -> Any:
    """The card of one name, which may hold slashes; an empty name leads to the list."""
    state: ServerState = request.app.state.server
    if not model_id:
        return RedirectResponse("../models")
    await state.model.refresh_adapters(model_id)
    return _card(state.model, state.model.resolve_name(model_id))
