"""Resolves a model's name to its folder or GGUF file: local, in the package, in the hub's cache or on the hub.

``HF_HOME``, ``HF_TOKEN``, ``HF_ENDPOINT`` and ``HF_HUB_OFFLINE`` have their usual meaning, because huggingface_hub does
the fetching.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from rustvllm.config.checkpoint import gguf_names
from rustvllm.config.checkpoint.gguf_file import is_gguf
from rustvllm.config.hub.failures import SHORT_NAMES, Wanted, same_names
from rustvllm.config.hub.snapshots import gguf_snapshot, model_snapshot
from rustvllm.config.hub.suggestions import EMBEDDED_MODEL, suggestion
from rustvllm.exceptions import HubUnreachableError, ModelLoadError, ModelNotFoundError

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?")
_MAX_NAME = 96 * 2 + 1


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """Where a model was found.

    Attributes:
        name: The name it was asked for by, or the embedded model's.
        path: Folder with its files, or its GGUF file.
        aliases: Other names of the same model.
    """

    name: str
    path: Path
    aliases: tuple[str, ...] = ()


def embedded_model_path() -> Path:
    """Folder of the model inside the package."""
    return Path(__file__).parents[2] / "assets" / "tiny"


def resolve_model(
    name: str | None,
    revision: str | None = None,
    download_dir: Path | None = None,
    *,
    with_weights: bool = True,
    with_code: bool = False,
    with_config: bool = True,
) -> ResolvedModel:
    """Find a model's folder or GGUF file, fetching it when it is on the hub and not yet here.

    Args:
        name: A folder, a GGUF file, a hub name (``owner/name``) or a short one (``gpt2``); ``folder:Q4_K_M``,
            ``owner/name:Q4_K_M`` and ``owner/name/file.gguf`` choose among GGUF files; None: the model inside the
            package.
        revision: Branch, tag or commit on the hub.
        download_dir: Where to keep what is fetched, instead of the hub's cache under ``HF_HOME``.
        with_weights: False fetches only the configuration and the tokenizer.
        with_code: Also fetch the model's Python files; whether they may run is decided elsewhere.
        with_config: False takes a repository of the hub without ``config.json``: one that holds a tokenizer alone.

    Raises:
        ModelNotFoundError: The name is neither a folder nor a model on the hub.
        ModelAccessError: The model is gated or private.
        HubUnreachableError: The model is not cached, and the hub cannot be reached.
        ModelLoadError: The hub failed in another way, or its model has no safetensors.
    """
    try:
        return _resolve(name, revision, download_dir, with_weights, with_code, with_config)
    except (ModelNotFoundError, HubUnreachableError) as error:
        if not name or not (advice := suggestion(name)):
            raise
        raise type(error)(f"{error}. {advice}") from error.__cause__


def _resolve(
    name: str | None,
    revision: str | None,
    download_dir: Path | None,
    with_weights: bool,
    with_code: bool,
    with_config: bool,
) -> ResolvedModel:
    """What ``resolve_model`` does, without suggestions."""
    if name is None or name == EMBEDDED_MODEL:
        path = embedded_model_path()
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(
                f"this installation has no embedded model (looked in {path}); name a model: a folder, or a hub model "
                "such as gpt2"
            )
        return ResolvedModel(EMBEDDED_MODEL, path)
    try:
        folder = Path(name).expanduser()
        is_folder, is_file = folder.is_dir(), folder.is_file()
    except (OSError, ValueError, RuntimeError):  # too long, contains a NUL, or ``~user`` of an unknown user
        folder, is_folder, is_file = Path(name[:_MAX_NAME]), False, False
    if is_folder:
        return ResolvedModel(name, _model_in(folder))
    if is_file and is_gguf(folder):
        return ResolvedModel(name, folder.absolute())
    if is_file:
        raise ModelNotFoundError(
            f"{folder} is not a GGUF file; name a GGUF file, or the folder that has config.json and the *.safetensors "
            "files"
        )
    bare, label = gguf_names.split_label(name)
    if label is not None and _is_folder(bare):
        folder = Path(bare).expanduser()
        return ResolvedModel(name, folder.absolute() / gguf_names.choose_file(_names_in(folder), label, bare))
    if name.startswith(("/", "./", "../", "~")) or name in {".", ".."}:
        raise ModelNotFoundError(f"there is no folder and no GGUF file {folder}")
    file = name.partition("/")[2].partition("/")[2]
    if file and is_gguf(Path(file)):
        bare, label = name[: -len(file) - 1], None
    is_named = label is not None or bool(file)
    if is_named and len(name) <= 2 * _MAX_NAME and _REPO_ID.fullmatch(bare) and ".." not in name:
        wanted = Wanted(bare, name, revision, download_dir)
        return ResolvedModel(name, gguf_snapshot(wanted, label, file))
    if not name or len(name) > _MAX_NAME or not _REPO_ID.fullmatch(name) or ".." in name or "--" in name:
        raise ModelNotFoundError(
            f"{name[:200]!r} is neither a local folder nor the name of a hub model, such as gpt2 or owner/name"
        )
    repo_id = SHORT_NAMES.get(name.lower(), name)
    wanted = Wanted(repo_id, name, revision, download_dir)
    path = model_snapshot(wanted, with_weights=with_weights, with_code=with_code, with_config=with_config)
    if with_weights and not any(path.glob("*.safetensors")):
        raise ModelLoadError(
            f"{repo_id} has no *.safetensors weights in {path}; rustvllm does not load other formats, because they can "
            "run code"
        )
    return ResolvedModel(name, path, tuple(alias for alias in same_names(repo_id) if alias != name))


def _is_folder(name: str) -> bool:
    try:
        return Path(name).expanduser().is_dir()
    except (OSError, ValueError, RuntimeError):
        return False


def _names_in(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir() if file.is_file()]


def _model_in(folder: Path) -> Path:
    """A folder that holds a model, or the GGUF file in it where there is nothing else.

    Raises:
        ModelNotFoundError: It holds no model, or several.
    """
    has_config = (folder / "config.json").is_file()
    has_gguf = any(is_gguf(Path(name)) for name in _names_in(folder))
    if has_gguf and not (has_config and any(folder.glob("*.safetensors"))):
        return folder.absolute() / gguf_names.choose_file(_names_in(folder), None, str(folder))
    if not has_config:
        is_adapter = (folder / "adapter_config.json").is_file()
        advice = "; it is an adapter: serve its base model with --enable-lora (docs/lora.md)" if is_adapter else ""
        raise ModelNotFoundError(
            f"the folder {folder} has no config.json and no GGUF file, so it does not hold a model{advice}"
        )
    return folder.absolute()
