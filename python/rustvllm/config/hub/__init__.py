"""Resolves a model's name to its folder or GGUF file: local, in the package, in the hub's cache or on the hub.

It only fetches safetensors weights, JSON and tokenizer files, and Python files if the model's code is trusted; or one
GGUF model if the name selects one. ``HF_HOME``, ``HF_TOKEN``, ``HF_ENDPOINT`` and ``HF_HUB_OFFLINE`` have their usual
meaning, because huggingface_hub does the fetching.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from rustvllm.config.checkpoint import gguf_names
from rustvllm.config.checkpoint.gguf_file import is_gguf
from rustvllm.config.hub.download import fetch, model_info
from rustvllm.config.hub.failures import SHORT_NAMES, at_revision, explain, is_offline, root_cause, same_names
from rustvllm.exceptions import ConfigError, ModelLoadError, ModelNotFoundError
from rustvllm.logger import init_logger

logger = init_logger(__name__)

EMBEDDED_MODEL: Final = "rustvllm-tiny"
"""Name of the model inside the package, used when no name is given."""
_JSON_PATTERNS = ("*.json", "*.txt", "*.jinja", "tokenizer.model")
_WEIGHT_PATTERNS = ("*.safetensors",)
_CODE_PATTERNS = ("*.py",)
_TEMPLATE_PATTERN = "additional_chat_templates/*.jinja"
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
    path = _snapshot(
        repo_id,
        name,
        revision,
        download_dir,
        with_weights=with_weights,
        with_code=with_code,
        with_config=with_config,
    )
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


def _snapshot(
    repo_id: str,
    name: str,
    revision: str | None,
    download_dir: Path | None,
    *,
    with_weights: bool,
    with_code: bool = False,
    with_config: bool = True,
) -> Path:
    """The folder of a hub model, fetched if need be; the cached copy when the hub cannot be asked."""
    names = same_names(repo_id)
    needed = [*(["config.json"] if with_config else ()), *(_WEIGHT_PATTERNS if with_weights else ())]
    patterns = [
        *_JSON_PATTERNS,
        *(_WEIGHT_PATTERNS if with_weights else ()),
        *(_CODE_PATTERNS if with_code else ()),
    ]

    def cached(names: Sequence[str], revision: str | None, needed: Sequence[str]) -> tuple[Path | None, list[str]]:
        def look_up(name: str) -> Path:
            return fetch(name, revision, download_dir, patterns, _IGNORED_PATTERNS, local_files_only=True)

        return _find_cached(look_up, names, needed)

    try:
        info = model_info(repo_id, revision)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 -- every failure of the hub is explained, none is a traceback
        path, lacking = cached(names, revision, needed)
        if path is None:  # not cached, or not completely: the first error is the reason
            explain(error, repo_id, name, revision, download_dir, lacking)
        if not is_offline():
            logger.warning("using the cached copy of %s: %s", at_revision(repo_id, revision), root_cause(error))
        return path
    # The same commit under another name need not be fetched again, if it is there with its tokenizer.
    if info.sha and cached(names[:1], info.sha, needed)[0] is None:
        path, _ = cached(names[1:], info.sha, [*needed, "tokenizer.json"])
        if path is not None:
            return path
    files = [sibling.rfilename for sibling in info.siblings or ()]
    if files:
        _check_files(files, repo_id, revision, with_weights=with_weights, with_config=with_config)
    try:
        path = fetch(repo_id, revision, download_dir, patterns, _IGNORED_PATTERNS, local_files_only=False)
        if any(fnmatchcase(file, _TEMPLATE_PATTERN) for file in files):  # which the ignored patterns leave out
            fetch(repo_id, path.name, download_dir, [_TEMPLATE_PATTERN], local_files_only=False)
    except Exception as error:  # noqa: BLE001
        explain(error, repo_id, name, revision, download_dir, cached(names, revision, needed)[1], is_download=True)
    if with_config and not (path / "config.json").is_file():
        raise ModelLoadError(f"{at_revision(repo_id, revision)} has no config.json in {path}")
    return path


def _check_files(
    files: Sequence[str], repo_id: str, revision: str | None, *, with_weights: bool, with_config: bool
) -> None:
    """Refuse a repository that holds no model before anything of it is fetched.

    Args:
        files: Names of all its files.
        repo_id: Full name.
        revision: As it was asked for.
        with_weights: Whether there must be weights.
        with_config: Whether there must be a configuration.

    Raises:
        ModelLoadError: Says what is missing, and what works.
    """
    what = at_revision(repo_id, revision)
    instead = gguf_names.advice(files, repo_id)
    if with_config and "config.json" not in files:
        if "adapter_config.json" in files:
            instead = (
                "; it is an adapter: serve its base model with --enable-lora, and name a folder with the adapter's "
                "files in --lora-modules (docs/lora.md)"
            )
        raise ModelLoadError(f"{what} has no config.json, so it does not hold a model{instead}")
    if with_weights and not any(fnmatchcase(file, _WEIGHT_PATTERNS[0]) and "/" not in file for file in files):
        if not instead:
            instead = "; rustvllm does not load other formats, because they can run code"
        raise ModelLoadError(f"{what} has no *.safetensors weights{instead}")


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

    def chosen(names: Sequence[str]) -> str:
        if not file:
            return gguf_names.choose_file(names, label, repo_id)
        if file not in names:
            raise ModelNotFoundError(f"{at_revision(repo_id, revision)} has no file {file}")
        return file

    def cached() -> Path | None:
        try:
            folder = fetch(
                repo_id, revision, download_dir, [], local_files_only=True
            )  # others of its files may be missing
            found = chosen([path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")])
        except Exception:  # noqa: BLE001 -- of no use, whatever the reason
            return None
        return folder / found if all((folder / part).is_file() for part in gguf_names.parts_of(found)) else None

    try:
        info = model_info(repo_id, revision)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 -- every failure of the hub is explained, none is a traceback
        path = cached()
        if path is None:
            explain(error, repo_id, name, revision, download_dir, [])
        if not is_offline():
            logger.warning("using the cached copy of %s: %s", at_revision(repo_id, revision), root_cause(error))
        return path
    found = chosen([sibling.rfilename for sibling in info.siblings or []])
    try:
        parts = gguf_names.parts_of(found)
        folder = fetch(repo_id, revision, download_dir, parts, local_files_only=False)
    except Exception as error:  # noqa: BLE001
        explain(error, repo_id, name, revision, download_dir, [], is_download=True)
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
