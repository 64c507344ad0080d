"""The files of a hub model: fetched if need be, else the cached copy. Nothing is fetched of what cannot be served.

It only fetches safetensors weights, JSON and tokenizer files, and Python files if the model's code is trusted; or one
GGUF model if the name selects one.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from rustvllm.config.checkpoint import gguf_names
from rustvllm.config.hub.download import Listing, check_cached, fetch, list_files, look_up
from rustvllm.config.hub.failures import Wanted, explain, is_offline, root_cause, same_names
from rustvllm.exceptions import ConfigError, ModelLoadError, ModelNotFoundError
from rustvllm.logger import init_logger

logger = init_logger(__name__)

_JSON_PATTERNS = ("*.json", "*.txt", "*.jinja", "tokenizer.model")
_WEIGHT_PATTERNS = ("*.safetensors",)
_CODE_PATTERNS = ("*.py",)
_TEMPLATE_PATTERN = "additional_chat_templates/*.jinja"
# Folders hold exports to other formats; "consolidated" are the same weights under other names.
_IGNORED_PATTERNS = ("*/*", "consolidated*.safetensors")


def model_snapshot(wanted: Wanted, *, with_weights: bool, with_code: bool = False, with_config: bool = True) -> Path:
    """The folder of a hub model, fetched if need be; the cached copy when the hub cannot be asked.

    Args:
        wanted: Which model.
        with_weights: False fetches only the configuration and the tokenizer.
        with_code: Also fetch the model's Python files.
        with_config: False takes a repository without ``config.json``.

    Raises:
        ModelLoadError: Or one of its classes: it cannot be found, fetched or served.
    """
    names = same_names(wanted.repo_id)
    needed = [*(["config.json"] if with_config else ()), *(_WEIGHT_PATTERNS if with_weights else ())]
    patterns = [
        *_JSON_PATTERNS,
        *(_WEIGHT_PATTERNS if with_weights else ()),
        *(_CODE_PATTERNS if with_code else ()),
    ]

    def cached(names: Sequence[str], revision: str | None, needed: Sequence[str]) -> tuple[Path | None, list[str]]:
        copies = [replace(wanted, repo_id=name, revision=revision) for name in names]
        return find_cached(copies, needed, patterns, _IGNORED_PATTERNS)

    listing = listing_or_cached(wanted, lambda: cached(names, wanted.revision, needed))
    if isinstance(listing, Path):
        return listing
    # The same commit under another name need not be fetched again, if it is there with its tokenizer.
    if listing.commit and cached(names[:1], listing.commit, needed)[0] is None:
        path, _ = cached(names[1:], listing.commit, [*needed, "tokenizer.json"])
        if path is not None:
            return path
    files = listing.names
    if files:
        _check_files(files, wanted, with_weights=with_weights, with_config=with_config)
    try:
        path = fetch(wanted, listing, patterns, _IGNORED_PATTERNS)
        if any(fnmatchcase(file, _TEMPLATE_PATTERN) for file in files):  # which the ignored patterns leave out
            fetch(wanted, listing, [_TEMPLATE_PATTERN])
    except Exception as error:  # noqa: BLE001 -- every failure of the hub is explained, none is a traceback
        explain(error, wanted, cached(names, wanted.revision, needed)[1], is_download=True)
    if with_config and not (path / "config.json").is_file():
        raise ModelLoadError(f"{wanted.what} has no config.json in {path}")
    return path


def listing_or_cached(wanted: Wanted, find: Callable[[], tuple[Path | None, list[str]]]) -> Listing | Path:
    """The hub's list of a repository's files; its cached copy if the hub cannot be asked.

    Args:
        wanted: Which repository.
        find: Finds the cached copy: as ``find_cached`` returns it.

    Raises:
        ModelLoadError: Or one of its classes: there is neither, or bytes of the copy are wrong.
    """
    try:
        return list_files(wanted)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 -- every failure of the hub is explained, none is a traceback
        path, lacking = find()
        if path is None:  # not cached, or not completely: the first error is the reason
            explain(error, wanted, lacking)
        if not is_offline():
            logger.warning("using the cached copy of %s: %s", wanted.what, root_cause(error))
        return path


def find_cached(
    copies: Sequence[Wanted], needed: Sequence[str], patterns: Sequence[str], ignored: Sequence[str] = ()
) -> tuple[Path | None, list[str]]:
    """The first cached folder that has every needed file.

    Args:
        copies: The same repository under all its names.
        needed: Patterns of file names, each of which some file must match.
        patterns: Of the files that are read.
        ignored: Of those that are not read nevertheless.

    Returns:
        The folder or None, and for every folder that was passed over what it lacks.

    Raises:
        ModelLoadError: Bytes of its files are not those that the hub had.
    """
    lacking = []
    for copy in copies:
        try:
            folder = look_up(copy, patterns, ignored)
        except Exception as error:  # noqa: BLE001 -- of no use for this name, whatever the reason
            if type(error).__name__ == "IncompleteSnapshotError":  # early releases of huggingface_hub have none
                lacking.append(f"the download of {copy.repo_id} was not finished")
            continue
        missing = [pattern for pattern in needed if not any(file.is_file() for file in folder.glob(pattern))]
        if not missing:
            check_cached(copy, folder)
            return folder, lacking
        lacking.append(f"{folder} has no {' and no '.join(missing)}")
    return None, lacking


def _check_files(files: Sequence[str], wanted: Wanted, *, with_weights: bool, with_config: bool) -> None:
    """Refuse a repository that holds no model before anything of it is fetched.

    Args:
        files: Names of all its files.
        wanted: Which repository.
        with_weights: Whether there must be weights.
        with_config: Whether there must be a configuration.

    Raises:
        ModelLoadError: Says what is missing, and what works.
    """
    instead = gguf_names.advice(files, wanted.repo_id)
    if with_config and "config.json" not in files:
        if "adapter_config.json" in files:
            instead = (
                "; it is an adapter: serve its base model with --enable-lora, and name the adapter in --lora-modules: "
                f"NAME={wanted.repo_id} (docs/lora.md)"
            )
        raise ModelLoadError(f"{wanted.what} has no config.json, so it does not hold a model{instead}")
    if with_weights and not any(fnmatchcase(file, _WEIGHT_PATTERNS[0]) and "/" not in file for file in files):
        if not instead:
            instead = "; rustvllm does not load other formats, because they can run code"
        raise ModelLoadError(f"{wanted.what} has no *.safetensors weights{instead}")


def gguf_snapshot(wanted: Wanted, label: str | None, file: str) -> Path:
    """The GGUF file of a hub model, fetched if need be with the others that it was split into.

    Args:
        wanted: Which repository.
        label: Of the quantisation, as it was asked for.
        file: The file, as it was asked for; empty: the one of the label.

    Raises:
        ModelLoadError: Or one of its classes: it cannot be found or fetched.
    """

    def chosen(names: Sequence[str]) -> str:
        if not file:
            return gguf_names.choose_file(names, label, wanted.repo_id)
        if file not in names:
            raise ModelNotFoundError(f"{wanted.what} has no file {file}")
        return file

    def cached() -> tuple[Path | None, list[str]]:
        try:
            folder = look_up(wanted, [])  # others of its files may be missing
            found = chosen([path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")])
        except Exception:  # noqa: BLE001 -- of no use, whatever the reason
            return None, []
        if not all((folder / part).is_file() for part in gguf_names.parts_of(found)):
            return None, []
        check_cached(wanted, folder)
        return folder / found, []

    listing = listing_or_cached(wanted, cached)
    if isinstance(listing, Path):
        return listing
    found = chosen(listing.names)
    try:
        return fetch(wanted, listing, gguf_names.parts_of(found)) / found
    except Exception as error:  # noqa: BLE001 -- every failure of the hub is explained, none is a traceback
        explain(error, wanted, [], is_download=True)
