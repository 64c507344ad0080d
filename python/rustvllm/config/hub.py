"""Resolves a model's name to its folder or GGUF file: local, in the package, in the hub's cache or on the hub.

It only fetches safetensors weights, JSON and tokenizer files, and Python files if the model's code is trusted; or one
GGUF model if the name selects one. ``HF_HOME``, ``HF_TOKEN``, ``HF_ENDPOINT`` and ``HF_HUB_OFFLINE`` have their usual
meaning, because huggingface_hub does the fetching.
"""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from rustvllm import envs
from rustvllm.config.checkpoint import gguf_names
from rustvllm.config.checkpoint.gguf_file import is_gguf
from rustvllm.exceptions import (
    ConfigError,
    HubUnreachableError,
    ModelAccessError,
    ModelLoadError,
    ModelNotFoundError,
)
from rustvllm.logger import init_logger, redact

logger = init_logger(__name__)

EMBEDDED_MODEL: Final = "rustvllm-tiny"
"""Name of the model inside the package, used when no name is given."""
SHORT_NAMES: Final = {
    "gpt2": "openai-community/gpt2",
    "gpt-2": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
    "gpt2-large": "openai-community/gpt2-large",
    "gpt2-xl": "openai-community/gpt2-xl",
    "distilgpt2": "distilbert/distilgpt2",
}
"""Short names, and the hub's full names for them."""

_JSON_PATTERNS = ("*.json", "*.txt", "*.jinja", "tokenizer.model")
_WEIGHT_PATTERNS = ("*.safetensors",)
_CODE_PATTERNS = ("*.py",)
# Folders hold exports to other formats; "consolidated" are the same weights under other names.
_IGNORED_PATTERNS = ("*/*", "consolidated*.safetensors")
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
    return Path(__file__).parents[1] / "assets" / "tiny"


def resolve_model(
    name: str | None,
    revision: str | None = None,
    download_dir: Path | None = None,
    *,
    with_weights: bool = True,
    with_code: bool = False,
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

    Raises:
        ModelNotFoundError: The name is neither a folder nor a model on the hub.
        ModelAccessError: The model is gated or private.
        HubUnreachableError: The model is not cached, and the hub cannot be reached.
        ModelLoadError: The hub failed in another way, or its model has no safetensors.
    """
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
        return ResolvedModel(name, _gguf_snapshot(bare, name, label, file, revision, download_dir))
    if not name or len(name) > _MAX_NAME or not _REPO_ID.fullmatch(name) or ".." in name or "--" in name:
        raise ModelNotFoundError(
            f"{name[:200]!r} is neither a local folder nor the name of a hub model, such as gpt2 or owner/name"
        )
    repo_id = SHORT_NAMES.get(name.lower(), name)
    path = _snapshot(repo_id, name, revision, download_dir, with_weights=with_weights, with_code=with_code)
    if with_weights and not any(path.glob("*.safetensors")):
        raise ModelLoadError(
            f"{repo_id} has no *.safetensors weights; if it has GGUF files, name one ({repo_id}:Q8_0); rustvllm does "
            "not load other formats, because they can run code"
        )
    return ResolvedModel(name, path, tuple(alias for alias in _same_names(repo_id) if alias != name))


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


def _same_names(repo_id: str) -> list[str]:
    """All names of a hub model, the full one first. Older tools keep it in their cache under a short one."""
    return [repo_id, *(short for short, full in SHORT_NAMES.items() if full == repo_id)]


def _snapshot(
    repo_id: str,
    name: str,
    revision: str | None,
    download_dir: Path | None,
    *,
    with_weights: bool,
    with_code: bool = False,
) -> Path:
    """The folder of a hub model, fetched if need be; the cached copy when the hub cannot be asked."""
    from huggingface_hub import HfApi, snapshot_download

    names = _same_names(repo_id)
    needed = ["config.json", *(_WEIGHT_PATTERNS if with_weights else ())]

    def fetch(repo_id: str, revision: str | None, *, local_files_only: bool) -> Path:
        folder = snapshot_download(
            repo_id,
            revision=revision,
            cache_dir=None if download_dir is None else str(download_dir),
            allow_patterns=[
                *_JSON_PATTERNS,
                *(_WEIGHT_PATTERNS if with_weights else ()),
                *(_CODE_PATTERNS if with_code else ()),
            ],
            ignore_patterns=list(_IGNORED_PATTERNS),
            library_name="rustvllm",
            local_files_only=local_files_only,
        )
        return Path(folder)

    def cached(names: Sequence[str], revision: str | None, needed: Sequence[str]) -> tuple[Path | None, list[str]]:
        return _find_cached(lambda name: fetch(name, revision, local_files_only=True), names, needed)

    try:
        # Asked first with a time limit: the download itself would wait for ever for a hub that says nothing.
        info = HfApi(library_name="rustvllm").model_info(repo_id, revision=revision, timeout=envs.hub_timeout())
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 -- every failure of the hub is explained, none is a traceback
        path, lacking = cached(names, revision, needed)
        if path is None:  # not cached, or not completely: the first error is the reason
            _explain(error, repo_id, name, revision, download_dir, lacking)
        if not _is_offline():
            logger.warning("using the cached copy of %s: %s", _at(repo_id, revision), _root_cause(error))
        return path
    # The same commit under another name need not be fetched again, if it is there with its tokenizer.
    if info.sha and cached(names[:1], info.sha, needed)[0] is None:
        path, _ = cached(names[1:], info.sha, [*needed, "tokenizer.json"])
        if path is not None:
            return path
    try:
        path = fetch(repo_id, revision, local_files_only=False)
    except Exception as error:  # noqa: BLE001
        _explain(error, repo_id, name, revision, download_dir, cached(names, revision, needed)[1])
    if not (path / "config.json").is_file():
        raise ModelLoadError(
            f"{_at(repo_id, revision)} has no config.json in {path}; if it has GGUF files, name one ({repo_id}:Q8_0)"
        )
    return path


def _gguf_snapshot(
    repo_id: str,
    name: str,
    label: str | None,
    file: str,
    revision: str | None,
    download_dir: Path | None,
) -> Path:
    """The GGUF file of a hub model, fetched if need be with the others that it was split into.

    Args:
        repo_id: Full name of the repository.
        name: The name it was asked for by.
        label: Of the quantisation, as it was asked for.
        file: The file, as it was asked for; empty: the one of the label.
        revision: As it was asked for.
        download_dir: As it was asked for.
    """
    from huggingface_hub import HfApi, snapshot_download

    def chosen(names: Sequence[str]) -> str:
        if not file:
            return gguf_names.choose_file(names, label, repo_id)
        if file not in names:
            raise ModelNotFoundError(f"{_at(repo_id, revision)} has no file {file}")
        return file

    def fetch(patterns: Sequence[str], *, local_files_only: bool) -> Path:
        folder = snapshot_download(
            repo_id,
            revision=revision,
            cache_dir=None if download_dir is None else str(download_dir),
            allow_patterns=list(patterns),
            library_name="rustvllm",
            local_files_only=local_files_only,
        )
        return Path(folder)

    def cached() -> Path | None:
        try:
            folder = fetch([], local_files_only=True)  # others of its files may be missing
            found = chosen([path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")])
        except Exception:  # noqa: BLE001 -- of no use, whatever the reason
            return None
        return folder / found if all((folder / part).is_file() for part in gguf_names.parts_of(found)) else None

    try:
        info = HfApi(library_name="rustvllm").model_info(repo_id, revision=revision, timeout=envs.hub_timeout())
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 -- every failure of the hub is explained, none is a traceback
        path = cached()
        if path is None:
            _explain(error, repo_id, name, revision, download_dir, [])
        if not _is_offline():
            logger.warning("using the cached copy of %s: %s", _at(repo_id, revision), _root_cause(error))
        return path
    found = chosen([sibling.rfilename for sibling in info.siblings or []])
    try:
        folder = fetch(gguf_names.parts_of(found), local_files_only=False)
    except Exception as error:  # noqa: BLE001
        _explain(error, repo_id, name, revision, download_dir, [])
    return folder / found


def _find_cached(
    look_up: Callable[[str], Path], names: Sequence[str], needed: Sequence[str]
) -> tuple[Path | None, list[str]]:
    """The first cached folder that has every needed file.

    Args:
        look_up: From a name to its folder in the cache; raises when there is none.
        names: Names of the same model.
        needed: Patterns of file names.

    Returns:
        The folder or None, and for every folder that was passed over what it lacks.
    """
    lacking = []
    for name in names:
        try:
            folder = look_up(name)
        except Exception as error:  # noqa: BLE001 -- of no use for this name, whatever the reason
            if type(error).__name__ == "IncompleteSnapshotError":  # early releases of huggingface_hub have none
                lacking.append(f"the download of {name} was not finished")
            continue
        missing = [pattern for pattern in needed if not any(file.is_file() for file in folder.glob(pattern))]
        if not missing:
            return folder, lacking
        lacking.append(f"{folder} has no {' and no '.join(missing)}")
    return None, lacking


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _explain(
    error: Exception,
    repo_id: str,
    name: str,
    revision: str | None,
    download_dir: Path | None,
    lacking: Sequence[str],
) -> NoReturn:
    """Raise an error that says which model was not found, where, and what to do.

    Args:
        error: What the hub's client raised.
        repo_id: Full name of the model.
        name: The name it was asked for by.
        revision: As it was asked for.
        download_dir: As it was asked for.
        lacking: What the cached copies lack, if there are any.
    """
    from huggingface_hub import constants, errors

    endpoint, what = constants.ENDPOINT, _at(repo_id, revision)
    asked = "" if name == repo_id else f" (asked for as {name})"
    cache = download_dir or Path(constants.HF_HUB_CACHE)
    status = getattr(getattr(error, "response", None), "status_code", None)
    has_token = bool(os.environ.get("HF_TOKEN")) or Path(constants.HF_TOKEN_PATH).is_file()
    if isinstance(error, errors.GatedRepoError):
        raise ModelAccessError(
            f"{what}{asked} is gated: accept its licence at {endpoint}/{repo_id}, then set HF_TOKEN to a token of that "
            "account" + (" (your current token has no access)" if has_token else "")
        ) from error
    if isinstance(error, errors.RevisionNotFoundError):
        raise ModelNotFoundError(
            f"{repo_id}{asked} has no revision {revision!r}; see {endpoint}/{repo_id}/branches or leave --revision out"
        ) from error
    if isinstance(error, errors.RepositoryNotFoundError):
        hint = "your current HF_TOKEN has no access to it" if has_token else "if it is private, set HF_TOKEN"
        raise ModelNotFoundError(
            f"there is no model {what}{asked} on {endpoint}, and no local folder of that name; check the spelling, or "
            f"{hint}"
        ) from error
    if status in (401, 403):
        raise ModelAccessError(
            f"{endpoint} refuses access to {what}{asked} (HTTP {status}): "
            + ("the token is wrong or has no access" if has_token else "set HF_TOKEN")
        ) from error
    if isinstance(error, errors.HFValidationError):
        raise ModelNotFoundError(f"{name!r} is neither a local folder nor a valid hub name: {error}") from error
    if status is not None:
        raise ModelLoadError(f"{endpoint} answered HTTP {status} for {what}{asked}; try again later") from error
    if _is_network_error(error):
        reason = (
            "offline mode is on (HF_HUB_OFFLINE)"
            if _is_offline()
            else f"{endpoint} cannot be reached ({_root_cause(error)})"
        )
        state = (
            f"the cache in {cache} is incomplete ({'; '.join(lacking)})" if lacking else f"it is not cached in {cache}"
        )
        names = _same_names(repo_id)
        looked = f" (looked for {', '.join(names)})" if len(names) > 1 else ""
        raise HubUnreachableError(
            f"cannot get the model {what}{asked}: {state}{looked}, and {reason}. Connect to the network, "
            "copy the whole cache here (HF_HOME or --download-dir), or give a local folder with config.json and "
            "*.safetensors"
        ) from error
    if isinstance(error, OSError):
        raise ModelLoadError(f"cannot store {what} in {cache}: {error}") from error
    raise ModelLoadError(f"cannot get {what}{asked} from {endpoint}: {redact(str(error))}") from error


def _is_network_error(error: BaseException) -> bool:
    """True when no server answered; decided by the error's name, since the hub's client has changed HTTP libraries."""
    from huggingface_hub import errors

    known = (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, ConnectionError, TimeoutError)
    return isinstance(error, known) or any(cls.__name__ == "TransportError" for cls in type(error).__mro__)


def _root_cause(error: BaseException) -> str:
    """The innermost error that is about the network, in one line."""
    seen: set[int] = set()
    while (cause := error.__cause__ or error.__context__) is not None and id(cause) not in seen:
        seen.add(id(error))
        error = cause
    lines = str(error).splitlines() or [""]
    return redact(f"{type(error).__name__}: {lines[0]}".strip(": "))


def _at(repo_id: str, revision: str | None) -> str:
    return repo_id if revision is None else f"{repo_id} at revision {revision}"
