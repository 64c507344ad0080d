"""``POST /v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``: adapters come and go while the server runs.

Only folders below ``--lora-root`` are loaded, and what ``--lora-hub`` allows: who may send requests may not name other
files of this machine, nor have it download what its operator did not choose.
"""

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse

from rustvllm.config.hub.adapters import CONFIG_NAME, WEIGHTS_NAME, fetch_adapter, is_hub_name
from rustvllm.config.hub.download import in_thread
from rustvllm.config.lora import check_adapter_name
from rustvllm.exceptions import (
    ConfigError,
    HubUnreachableError,
    InvalidRequestError,
    ModelLoadError,
    ModelNotFoundError,
)
from rustvllm.server.errors import AdapterNotFoundError, UnavailableError
from rustvllm.server.schemas.protocol import LoadAdapterRequest, UnloadAdapterRequest
from rustvllm.server.schemas.request_body import read_request
from rustvllm.server.state import ServedModel, ServerState

MAX_PATH_CHARACTERS: Final = 4096


async def load_adapter(raw_request: Request) -> PlainTextResponse:
    """Load an adapter that this server's flags allow; requests of every API process may name it afterwards."""
    state: ServerState = raw_request.app.state.server
    request = await read_request(raw_request, LoadAdapterRequest)
    _check_allowed(state)
    name, path = request.lora_name, request.lora_path
    if not name or not path:
        raise InvalidRequestError(
            "Both 'lora_name' and 'lora_path' must be provided.", "lora_path" if name else "lora_name"
        )
    if len(path) > MAX_PATH_CHARACTERS:
        raise InvalidRequestError(
            f"lora_path has {len(path)} characters; at most {MAX_PATH_CHARACTERS} are allowed.", "lora_path"
        )
    model = state.model
    _check_name(name, model)
    root, owners = state.settings.lora_root, state.settings.lora_hub
    folder = None if root is None else await asyncio.to_thread(_folder_below, Path(root), path)
    if folder is None and _is_allowed(path, owners):
        await model.engine.check_adapter_is_new(name, load_inplace=request.load_inplace)  # before a download
        folder = await _fetch(state, path)
    if folder is None:
        raise _not_there(name, path, root, owners)
    await model.engine.load_adapter(name, str(folder), load_inplace=request.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload_adapter(raw_request: Request) -> PlainTextResponse:
    """Forget an adapter; requests under way keep it to their end."""
    state: ServerState = raw_request.app.state.server
    request = await read_request(raw_request, UnloadAdapterRequest)
    _check_allowed(state)
    name = request.lora_name
    if not name:
        raise InvalidRequestError("'lora_name' needs to be provided to unload a LoRA adapter.", "lora_name")
    engine = state.model.engine
    await engine.refresh_adapters()
    loaded = engine.adapters.get(name)
    if loaded is None or not await engine.remove_lora(loaded.request.lora_int_id):
        raise AdapterNotFoundError(f"The lora adapter '{name[:256]}' cannot be found.", param="lora_name")
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _check_allowed(state: ServerState) -> None:
    settings = state.settings
    if (settings.lora_root is None and not settings.lora_hub) or state.model.engine.config.lora is None:
        raise AdapterNotFoundError(
            "This server does not load adapters over HTTP: start it with --enable-lora and --lora-root FOLDER, the "
            "folder that contains them, or --lora-hub OWNER, whose adapters on the hub it may download."
        )


def _is_allowed(path: str, owners: Collection[str]) -> bool:
    """Whether a path is the name of an adapter on the hub that clients may have downloaded."""
    if not is_hub_name(path):
        return False
    return any(each.lower() in ("*", path.partition("/")[0].lower(), path.lower()) for each in owners)


async def _fetch(state: ServerState, repo_id: str) -> Path:
    """The folder of an adapter on the hub; one download at a time, in a thread that nothing else waits for.

    Raises:
        AdapterNotFoundError: The hub has none of that name.
        UnavailableError: The hub cannot be reached, or the download broke off.
        InvalidRequestError: It cannot be fetched for another reason, which the message says.
    """
    download_dir = state.model.engine.config.load.download_dir
    async with state.adapter_download:
        try:
            return await asyncio.wrap_future(
                in_thread(lambda: fetch_adapter(repo_id, download_dir), "rustvllm-adapter")
            )
        except ModelNotFoundError as error:
            raise AdapterNotFoundError(f"{error}.", param="lora_path") from error
        except HubUnreachableError as error:  # the request may be right, and clients try again
            raise UnavailableError(f"{error}.", param="lora_path") from error
        except ModelLoadError as error:
            raise InvalidRequestError(f"{error}.", "lora_path") from error


def _not_there(name: str, given: str, root: str | None, owners: Collection[str]) -> AdapterNotFoundError:
    places = [] if root is None else [f"there is no folder {given!r} below --lora-root"]
    if owners:
        places.append(f"{given!r} is not a hub name that --lora-hub allows ({', '.join(owners)})")
    return AdapterNotFoundError(f"Loading lora {name} failed: {', and '.join(places)}.", param="lora_path")


def _check_name(name: str, model: ServedModel) -> None:
    try:
        check_adapter_name(name)
    except ConfigError as error:
        raise InvalidRequestError(f"lora_name: {error}", "lora_name") from None
    if name in model.names:
        raise InvalidRequestError(f"The lora adapter '{name}' conflicts with a served base model.", "lora_name")


def _folder_below(root: Path, given: str) -> Path | None:
    """The adapter's folder with all links followed; None: it is not there.

    Raises:
        InvalidRequestError: It, or one of its files, is outside of the root.
    """
    try:
        real_root = root.resolve(strict=True)
        folder = (real_root / given).resolve()
        if not folder.is_relative_to(real_root):
            raise _outside(given)
        if not folder.is_dir():
            return None
        for file in (CONFIG_NAME, WEIGHTS_NAME):
            if not (folder / file).resolve().is_relative_to(real_root):
                raise _outside(f"{given}/{file}")
    except InvalidRequestError:  # a ValueError, too
        raise
    except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, a NUL
        raise InvalidRequestError(f"lora_path {given[:200]!r} cannot be read: {error}.", "lora_path") from None
    return folder


def _outside(given: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"lora_path {given[:200]!r} is outside the folder of --lora-root; the server only loads adapters from inside "
        "it.",
        "lora_path",
    )
