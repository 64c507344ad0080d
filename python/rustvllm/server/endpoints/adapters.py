"""``POST /v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``: adapters come and go while the server runs.

Only folders below ``--lora-root`` are loaded: who may send requests may not name other files of this machine.
"""

import asyncio
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse

from rustvllm.config.lora import CONFIG_NAME, WEIGHTS_NAME, check_adapter_name
from rustvllm.exceptions import ConfigError, InvalidRequestError
from rustvllm.server.errors import AdapterNotFoundError
from rustvllm.server.schemas.protocol import LoadAdapterRequest, UnloadAdapterRequest
from rustvllm.server.schemas.request_body import read_request
from rustvllm.server.state import ServedModel, ServerState

MAX_PATH_CHARACTERS: Final = 4096


async def load_adapter(raw_request: Request) -> PlainTextResponse:
    """Load an adapter from a folder below ``--lora-root``; requests of every API process may name it afterwards."""
    state: ServerState = raw_request.app.state.server
    request = await read_request(raw_request, LoadAdapterRequest)
    root = _root(state)
    name, path = request.lora_name, request.lora_path
    if not name or not path:
        raise InvalidRequestError(
            "Both 'lora_name' and 'lora_path' must be provided.", "lora_path" if name else "lora_name"
        )
    model = state.model
    _check_name(name, model)
    folder = await asyncio.to_thread(_folder_below, root, name, path)
    await model.engine.load_adapter(name, str(folder), load_inplace=request.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload_adapter(raw_request: Request) -> PlainTextResponse:
    """Forget an adapter; requests under way keep it to their end."""
    state: ServerState = raw_request.app.state.server
    request = await read_request(raw_request, UnloadAdapterRequest)
    _root(state)
    name = request.lora_name
    if not name:
        raise InvalidRequestError("'lora_name' needs to be provided to unload a LoRA adapter.", "lora_name")
    engine = state.model.engine
    await engine.refresh_adapters()
    loaded = engine.adapters.get(name)
    if loaded is None or not await engine.remove_lora(loaded.request.lora_int_id):
        raise AdapterNotFoundError(f"The lora adapter '{name[:256]}' cannot be found.", param="lora_name")
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _root(state: ServerState) -> Path:
    root = state.settings.lora_root
    if root is None or state.model.engine.config.lora is None:
        raise AdapterNotFoundError(
            "This server does not load adapters over HTTP: start it with --enable-lora and --lora-root FOLDER, the "
            "folder that contains them."
        )
    return Path(root)


def _check_name(name: str, model: ServedModel) -> None:
    try:
        check_adapter_name(name)
    except ConfigError as error:
        raise InvalidRequestError(f"lora_name: {error}", "lora_name") from None
    if name in model.names:
        raise InvalidRequestError(f"The lora adapter '{name}' conflicts with a served base model.", "lora_name")


def _folder_below(root: Path, name: str, given: str) -> Path:
    """The adapter's folder with all links followed.

    Raises:
        InvalidRequestError: It, or one of its files, is outside of the root.
        AdapterNotFoundError: It is not there.
    """
    if len(given) > MAX_PATH_CHARACTERS:
        raise InvalidRequestError(
            f"lora_path has {len(given)} characters; at most {MAX_PATH_CHARACTERS} are allowed.", "lora_path"
        )
    try:
        real_root = root.resolve(strict=True)
        folder = (real_root / given).resolve()
        if not folder.is_relative_to(real_root):
            raise _outside(given)
        if not folder.is_dir():
            raise AdapterNotFoundError(
                f"Loading lora {name} failed: there is no folder {given!r} below --lora-root.", param="lora_path"
            )
        for file in (CONFIG_NAME, WEIGHTS_NAME):
            if not (folder / file).resolve().is_relative_to(real_root):
                raise _outside(f"{given}/{file}")
    except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, a NUL
        raise InvalidRequestError(f"lora_path {given!r:.200} cannot be read: {error}.", "lora_path") from None
    return folder


def _outside(given: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"lora_path {given!r:.200} is outside the folder of --lora-root; the server only loads adapters from inside "
        "it.",
        "lora_path",
    )
