"""The files of an adapter on the hub: its configuration and its matrices, and nothing else of the repository."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from rustvllm.config.byte_sizes import readable_size
from rustvllm.config.hub.download import Listing, fetch
from rustvllm.config.hub.failures import Wanted, explain
from rustvllm.config.hub.snapshots import find_cached, listing_or_cached
from rustvllm.exceptions import ModelLoadError

CONFIG_NAME: Final = "adapter_config.json"
WEIGHTS_NAME: Final = "adapter_model.safetensors"
PICKLES: Final = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
LARGEST: Final[Mapping[str, int]] = {CONFIG_NAME: 4 << 20, WEIGHTS_NAME: 16 << 30}
"""bytes that each file may have: rank 256 for all layers of a model of 70 billion parameters has 13 GiB in float32."""
_NAME: Final = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*", re.ASCII)
_MOST_CHARACTERS: Final = 96 * 2 + 1


def is_hub_name(path: str) -> bool:
    """Whether a path may be the name of an adapter on the hub, ``owner/name``; a folder of that name comes first."""
    return len(path) <= _MOST_CHARACTERS and bool(_NAME.fullmatch(path)) and ".." not in path and "--" not in path


def fetch_adapter(repo_id: str, download_dir: Path | None = None) -> Path:
    """The folder with an adapter's two files at its main branch, fetched if need be.

    Args:
        repo_id: Full name, as ``is_hub_name`` takes it.
        download_dir: Where to keep what is fetched; None: in the hub's cache.

    Raises:
        ModelLoadError: Or one of its classes: it cannot be found, fetched or served.
    """
    files = [CONFIG_NAME, WEIGHTS_NAME]
    wanted = Wanted(repo_id, repo_id, None, download_dir, "adapter", " and ".join(files))
    listing = listing_or_cached(wanted, lambda: find_cached([wanted], files, files))
    if isinstance(listing, Path):
        return listing
    if listing.repo_id is not None and listing.repo_id.lower() == repo_id.lower():
        wanted = replace(wanted, repo_id=listing.repo_id)  # one copy, however clients spell it
    _check_listing(repo_id, listing)
    try:
        return fetch(wanted, listing, files)
    except Exception as error:  # noqa: BLE001 -- every failure of the hub is explained, none is a traceback
        explain(error, wanted, [], is_download=True)


def _check_listing(repo_id: str, listing: Listing) -> None:
    """Refuse what is not an adapter, and files that are too large, before anything is fetched."""
    names = listing.names
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if name in names:
            continue
        advice = "; peft's save_pretrained and push_to_hub write that file"
        if name == WEIGHTS_NAME and (pickles := [pickle for pickle in PICKLES if pickle in names]):
            advice = (
                f", but {pickles[0]}; rustvllm only loads safetensors, because a pickle can run code. Save the adapter "
                "again with peft's save_pretrained"
            )
        elif "config.json" in names:
            advice = ", but config.json: it is a model, not an adapter"
        raise ModelLoadError(f"{repo_id} has no {name}{advice}")
    for file in listing.files:
        limit = LARGEST.get(file.name)
        if limit is not None and file.size is not None and file.size > limit:
            raise ModelLoadError(
                f"{file.name} of {repo_id} has {readable_size(file.size)}; an adapter's may have at most "
                f"{readable_size(limit)}"
            )
