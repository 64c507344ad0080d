"""What the hub's client raises, as errors that say which model was not found, where, and what to do."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from rustvllm.exceptions import HubUnreachableError, ModelAccessError, ModelLoadError, ModelNotFoundError
from rustvllm.logger import redact

SHORT_NAMES: Final = {
    "gpt2": "openai-community/gpt2",
    "gpt-2": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
    "gpt2-large": "openai-community/gpt2-large",
    "gpt2-xl": "openai-community/gpt2-xl",
    "distilgpt2": "distilbert/distilgpt2",
}
"""Short names, and the hub's full names for them."""


def is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def explain(
    error: Exception,
    repo_id: str,
    name: str,
    revision: str | None,
    download_dir: Path | None,
    lacking: Sequence[str],
    *,
    is_download: bool = False,
) -> NoReturn:
    """Raise an error that says which model was not found, where, and what to do.

    Args:
        error: What the hub's client raised.
        repo_id: Full name of the model.
        name: The name it was asked for by.
        revision: As it was asked for.
        download_dir: As it was asked for.
        lacking: What the cached copies lack, if there are any.
        is_download: The hub had answered, and files were on their way.

    Raises:
        ModelLoadError: Or one of its classes.
    """
    from huggingface_hub import constants, errors

    endpoint, what = redact(constants.ENDPOINT), at_revision(repo_id, revision)
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
    if isinstance(error, UnicodeEncodeError):  # of a header
        raise ModelAccessError(
            f"cannot ask {endpoint} for {what}{asked}: your HF_TOKEN holds a character that no token has; copy it again"
        ) from error
    if is_download and (_is_network_error(error) or _is_of_wrong_size(error)):
        raise HubUnreachableError(
            f"the download of {what}{asked} from {endpoint} was not finished ({root_cause(error)}). Start again: the "
            f"files that are complete are kept in {cache}, the others are fetched again"
        ) from error
    if _is_network_error(error):
        reason = (
            "offline mode is on (HF_HUB_OFFLINE)"
            if is_offline()
            else f"{endpoint} cannot be reached ({root_cause(error)})"
        )
        state = (
            f"the cache in {cache} is incomplete ({'; '.join(lacking)})" if lacking else f"it is not cached in {cache}"
        )
        names = same_names(repo_id)
        looked = f" (looked for {', '.join(names)})" if len(names) > 1 else ""
        raise HubUnreachableError(
            f"cannot get the model {what}{asked}: {state}{looked}, and {reason}. Connect to the network, "
            "copy the whole cache here (HF_HOME or --download-dir), or give a local folder with config.json and "
            "*.safetensors"
        ) from error
    if isinstance(error, json.JSONDecodeError):
        raise ModelLoadError(
            f"{endpoint} answered for {what}{asked} with something other than the hub's JSON: check HF_ENDPOINT, and "
            "whether a proxy or the login page of a network answers instead of the hub"
        ) from error
    if isinstance(error, OSError):
        raise ModelLoadError(f"cannot store {what} in {cache}: {error}") from error
    raise ModelLoadError(f"cannot get {what}{asked} from {endpoint}: {redact(str(error))}") from error


def _is_network_error(error: BaseException) -> bool:
    """True when no server answered; decided by the error's name, since the hub's client has changed HTTP libraries."""
    from huggingface_hub import errors

    known = (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, ConnectionError, TimeoutError)
    return isinstance(error, known) or any(cls.__name__ == "TransportError" for cls in type(error).__mro__)


def _is_of_wrong_size(error: BaseException) -> bool:
    """True when a file came with more or fewer bytes than the hub says it has."""
    return isinstance(error, OSError) and error.errno is None and "Consistency check" in str(error)


def root_cause(error: BaseException) -> str:
    """The innermost error that is about the network, in one line."""
    seen: set[int] = set()
    while (cause := error.__cause__ or error.__context__) is not None and id(cause) not in seen:
        seen.add(id(error))
        error = cause
    lines = str(error).splitlines() or [""]
    return redact(f"{type(error).__name__}: {lines[0]}".strip(": "))


def at_revision(repo_id: str, revision: str | None) -> str:
    return repo_id if revision is None else f"{repo_id} at revision {revision}"


def same_names(repo_id: str) -> list[str]:
    """All names of a hub model, the full one first. Older tools keep it in their cache under a short one."""
    return [repo_id, *(short for short, full in SHORT_NAMES.items() if full == repo_id)]
