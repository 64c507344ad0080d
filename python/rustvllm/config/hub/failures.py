"""What the hub's client raises, as errors that say which model was not found, where, and what to do."""

import errno
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from rustvllm.exceptions import (
    HubUnreachableError,
    ModelAccessError,
    ModelLoadError,
    ModelNotFoundError,
    RustVLLMError,
)
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


_IS_FULL_IN_RUST: Final = "os error 28"
"""In errors of hf_xet, which are of no class of their own."""


def is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is looked for on the hub.

    Attributes:
        repo_id: Full name of the repository.
        name: The name it was asked for by.
        revision: Branch, tag or commit, as it was asked for; None: the main branch.
        download_dir: Where to keep what is fetched; None: in the hub's cache.
        kind: What messages call it: ``model`` or ``adapter``.
        files: What a local folder would have to hold, for messages.
    """

    repo_id: str
    name: str
    revision: str | None = None
    download_dir: Path | None = None
    kind: str = "model"
    files: str = "config.json and *.safetensors"

    @property
    def what(self) -> str:
        """Its full name, with the revision."""
        return self.repo_id if self.revision is None else f"{self.repo_id} at revision {self.revision}"

    @property
    def cache(self) -> Path:
        """Where what is fetched is kept."""
        from huggingface_hub import constants

        return self.download_dir or Path(constants.HF_HUB_CACHE)


def explain(error: Exception, wanted: Wanted, lacking: Sequence[str], *, is_download: bool = False) -> NoReturn:
    """Raise an error that says what was not found, where, and what to do.

    Args:
        error: What the hub's client raised, or an error that says all of this already.
        wanted: What was looked for.
        lacking: What the cached copies lack, if there are any.
        is_download: The hub had answered, and files were on their way.

    Raises:
        ModelLoadError: Or one of its classes.
    """
    from huggingface_hub import constants, errors

    if isinstance(error, RustVLLMError):
        raise error
    endpoint, cache, repo_id = redact(constants.ENDPOINT), wanted.cache, wanted.repo_id
    asked = "" if wanted.name == repo_id else f" (asked for as {wanted.name})"
    what = f"{wanted.what}{asked}"
    status = getattr(getattr(error, "response", None), "status_code", None)
    has_token = bool(os.environ.get("HF_TOKEN")) or Path(constants.HF_TOKEN_PATH).is_file()
    if isinstance(error, errors.GatedRepoError):
        raise ModelAccessError(
            f"{what} is gated: accept its licence at {endpoint}/{repo_id}, then set HF_TOKEN to a token of that "
            "account" + (" (your current token has no access)" if has_token else "")
        ) from error
    if isinstance(error, errors.RevisionNotFoundError):
        raise ModelNotFoundError(
            f"{repo_id}{asked} has no revision {wanted.revision!r}; see {endpoint}/{repo_id}/branches or leave "
            "--revision out"
        ) from error
    if isinstance(error, errors.RepositoryNotFoundError):
        hint = "your current HF_TOKEN has no access to it" if has_token else "if it is private, set HF_TOKEN"
        raise ModelNotFoundError(
            f"there is no {wanted.kind} {what} on {endpoint}, and no local folder of that name; check the spelling, "
            f"or {hint}"
        ) from error
    if status in (401, 403):
        raise ModelAccessError(
            f"{endpoint} refuses access to {what} (HTTP {status}): "
            + ("the token is wrong or has no access" if has_token else "set HF_TOKEN")
        ) from error
    if isinstance(error, errors.HFValidationError):
        raise ModelNotFoundError(f"{wanted.name!r} is neither a local folder nor a valid hub name: {error}") from error
    if status is not None:
        raise ModelLoadError(f"{endpoint} answered HTTP {status} for {what}; try again later") from error
    if isinstance(error, UnicodeEncodeError):  # of a header
        raise ModelAccessError(
            f"cannot ask {endpoint} for {what}: your HF_TOKEN holds a character that no token has; copy it again"
        ) from error
    if is_download and (_is_network_error(error) or _is_of_wrong_size(error)):
        raise HubUnreachableError(
            f"the download of {what} from {endpoint} was not finished ({root_cause(error)}). Start again: the "
            f"files that are complete are kept in {cache}, the others are fetched again"
        ) from error
    if _is_network_error(error):
        raise HubUnreachableError(_without_network(error, wanted, what, lacking)) from error
    if isinstance(error, json.JSONDecodeError):
        raise ModelLoadError(
            f"{endpoint} answered for {what} with something other than the hub's JSON: check HF_ENDPOINT, and "
            "whether a proxy or the login page of a network answers instead of the hub"
        ) from error
    if isinstance(error, OSError) or _IS_FULL_IN_RUST in str(error):
        raise ModelLoadError(
            f"cannot store {wanted.what} in {cache}: {redact(str(error))}{_advice_on_storage(error)}"
        ) from error
    raise ModelLoadError(f"cannot get {what} from {endpoint}: {redact(str(error))}") from error


def _without_network(error: Exception, wanted: Wanted, what: str, lacking: Sequence[str]) -> str:
    """What to say where no server answers, and the cache does not have what is wanted."""
    from huggingface_hub import constants

    if is_offline():
        reason = "offline mode is on (HF_HUB_OFFLINE)"
    else:
        reason = f"{redact(constants.ENDPOINT)} cannot be reached ({root_cause(error)})"
    cache = wanted.cache
    state = f"the cache in {cache} is incomplete ({'; '.join(lacking)})" if lacking else f"it is not cached in {cache}"
    names = same_names(wanted.repo_id)
    looked = f" (looked for {', '.join(names)})" if len(names) > 1 else ""
    return (
        f"cannot get the {wanted.kind} {what}: {state}{looked}, and {reason}. Connect to the network, "
        f"copy the whole cache here (HF_HOME or --download-dir), or give a local folder with {wanted.files}"
    )


def _advice_on_storage(error: Exception) -> str:
    """What to do about a folder that takes no files."""
    number = error.errno if isinstance(error, OSError) else errno.ENOSPC
    if number in (errno.ENOSPC, errno.EDQUOT):
        return ". Make room, or name a larger folder with --download-dir or HF_HOME"
    if number == errno.EFBIG:
        return ". Raise the limit on the size of a file (ulimit -f), or name another folder with --download-dir"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return (
            ". Name a folder that you may write to with --download-dir or HF_HOME; or set HF_HUB_OFFLINE=1 to use an "
            "older copy that is there"
        )
    if number in (errno.ENOTDIR, errno.EEXIST):
        return ". Name a folder with --download-dir or HF_HOME"
    return ""


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


def same_names(repo_id: str) -> list[str]:
    """All names of a hub model, the full one first. Older tools keep it in their cache under a short one."""
    return [repo_id, *(short for short, full in SHORT_NAMES.items() if full == repo_id)]
