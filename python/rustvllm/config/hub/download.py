"""Fetches files from the hub so that a download can be interrupted, and a hub that falls silent is given up.

huggingface_hub does the fetching. Left alone, it waits for ever for answers about a repository, and Ctrl-C only takes
effect when the file that is on its way has come.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, TypeVar

from rustvllm import envs
from rustvllm.config.byte_sizes import readable_size
from rustvllm.config.hub.checksums import check_files
from rustvllm.config.hub.failures import Wanted
from rustvllm.config.hub.storage import HubFile, RepoStorage, is_sha256
from rustvllm.exceptions import ModelLoadError
from rustvllm.logger import mask_library

Result = TypeVar("Result")

_LIBRARY: Final = "huggingface_hub"
_CALLER: Final = "rustvllm"
"""Who asks, for the hub's statistics."""
_TIDY_SECONDS: Final = 0.5
"""For the thread of an interrupted download to take its unfinished file away."""

_time_limits = threading.Lock()
"""Guards the two that follow."""
_limited: list[Any] = []
"""The session of each ``time_limit`` that goes on; threads share one."""
_unlimited: list[Any] = []
"""Those of them that had no limit."""


class _AbandonedError(Exception):
    """Ends the thread of a download whose caller has gone."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What the hub says of a repository.

    Attributes:
        commit: Of the revision; None: the hub does not say.
        files: All files of that commit; none if the hub does not list them.
        repo_id: Its name as the hub spells it, to which upper and lower case are often the same; None: it does not say.
    """

    commit: str | None
    files: tuple[HubFile, ...]
    repo_id: str | None = None

    @property
    def names(self) -> list[str]:
        """Of the files."""
        return [file.name for file in self.files]


def list_files(wanted: Wanted) -> Listing:
    """Ask the hub for a repository's files. It has ``RUSTVLLM_HUB_TIMEOUT`` seconds.

    Raises:
        ModelLoadError: It names a file or a commit that would be outside of the repository's folder.
        Exception: Whatever the hub's client raises.
    """
    from huggingface_hub import HfApi

    api = HfApi(library_name=_CALLER)
    info = api.model_info(wanted.repo_id, revision=wanted.revision, timeout=envs.hub_timeout(), files_metadata=True)
    files = []
    for sibling in info.siblings or ():
        sha256 = None if sibling.lfs is None else sibling.lfs.sha256
        files.append(HubFile(sibling.rfilename, sibling.size, sha256 if is_sha256(sha256) else None))
    _check_paths(wanted, [*(file.name for file in files), *(() if info.sha is None else (info.sha,))])
    return Listing(info.sha, tuple(files), info.id)


def look_up(wanted: Wanted, patterns: Sequence[str], ignored: Sequence[str] = ()) -> Path:
    """The folder of a repository in the cache, at a revision.

    Args:
        wanted: Which repository.
        patterns: Of the names of the files that are needed, relative to the repository.
        ignored: Patterns of files that are not needed nevertheless.

    Raises:
        Exception: Whatever the hub's client raises.
    """
    return _snapshot(wanted, wanted.revision, patterns, ignored, local_files_only=True)


def fetch(wanted: Wanted, listing: Listing, patterns: Sequence[str], ignored: Sequence[str] = ()) -> Path:
    """The folder of a repository with the files of these names, fetched if they are not in the cache.

    Args:
        wanted: Which repository.
        listing: Its files.
        patterns: Of the names of the files that are needed, relative to the repository.
        ignored: Patterns of files to leave out nevertheless.

    Raises:
        ModelLoadError: There is no room for the files, or bytes of one have changed on the way.
        Exception: Whatever the hub's client raises.
    """
    storage, commit = RepoStorage(wanted.cache, wanted.repo_id), listing.commit
    files = [file for file in listing.files if _is_any(file.name, patterns) and not _is_any(file.name, ignored)]
    if commit is None or not files:  # the hub's client may know more
        return _download(wanted, wanted.revision, patterns, ignored)
    missing = [file for file in files if not storage.has(commit, file)]
    fresh = {file.name for file in missing}
    path = storage.snapshot(commit)
    if missing:
        storage.remove_leftovers()
        _check_room(wanted, storage, missing)
        # A copy that is whole keeps the name until this one is: offline, it is of more use.
        storage.note_revision(wanted.revision or "main", commit, replace=False)
        storage.mark_unchecked(file.sha256 for file in missing if file.sha256 is not None)
    if not all((path / file.name).is_file() for file in files):
        # By its commit: a branch that moves meanwhile would bring other files than those that were listed.
        path = _download(wanted, commit, patterns, ignored)
    unchecked = [
        file for file in files if file.name in fresh or (file.sha256 is not None and storage.is_unchecked(file.sha256))
    ]
    if unchecked:
        check_files(storage, wanted.repo_id, [(path / file.name, file) for file in unchecked])
    storage.note_revision(wanted.revision or "main", commit)
    return path


def check_cached(wanted: Wanted, folder: Path) -> None:
    """Do what a start before this one left undone: compare files of a cached commit with their hashes.

    Raises:
        ModelLoadError: A file has another hash than the hub gives; it is removed.
    """
    storage = RepoStorage(wanted.cache, wanted.repo_id)
    if unchecked := storage.unchecked_files(folder):
        check_files(storage, wanted.repo_id, unchecked)


def in_thread(work: Callable[[], Result], name: str) -> "Future[Result]":
    """The result of work in a thread of its own, for which the end of the program does not wait."""
    done: Future[Result] = Future()
    done.set_running_or_notify_cancel()  # so that who stops waiting does not cancel it

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 -- raised where it is waited for
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


def _check_paths(wanted: Wanted, paths: Sequence[str]) -> None:
    """Refuse what would lead out of the repository's folder, where files are written and removed by these names."""
    for path in paths:
        if not path or path.startswith("/") or not {".", ".."}.isdisjoint(path.split("/")):
            raise ModelLoadError(
                f"the hub's list of the files of {wanted.what} has {path!r:.200}, which is not inside the "
                "repository: check HF_ENDPOINT, and whether a proxy answers instead of the hub"
            )


def _is_any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_room(wanted: Wanted, storage: RepoStorage, missing: Sequence[HubFile]) -> None:
    needed, free = sum(file.size or 0 for file in missing), storage.free_bytes()
    if free is not None and needed > free:
        raise ModelLoadError(
            f"there is no room for {wanted.what}: {readable_size(needed)} are to be downloaded, but {wanted.cache} "
            f"has {readable_size(free)} free. Make room, or name a larger folder with --download-dir or HF_HOME"
        )


def _download(wanted: Wanted, revision: str | None, patterns: Sequence[str], ignored: Sequence[str]) -> Path:
    mask_library(_LIBRARY)  # its warnings have the signed addresses of files
    with time_limit():
        return _interruptible(
            lambda progress: _snapshot(wanted, revision, patterns, ignored, local_files_only=False, tqdm_class=progress)
        )


def _snapshot(
    wanted: Wanted,
    revision: str | None,
    patterns: Sequence[str],
    ignored: Sequence[str],
    *,
    local_files_only: bool,
    tqdm_class: type[Any] | None = None,
) -> Path:
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        wanted.repo_id,
        revision=revision,
        cache_dir=None if wanted.download_dir is None else str(wanted.download_dir),
        allow_patterns=list(patterns),
        ignore_patterns=list(ignored),
        library_name=_CALLER,
        local_files_only=local_files_only,
        tqdm_class=tqdm_class,
    )
    return Path(folder)


def _interruptible(download: Callable[[type[Any]], Path]) -> Path:
    """The result of a download in a thread, which stops at the next bytes when this one is interrupted."""
    from huggingface_hub.utils.tqdm import tqdm

    base: Any = tqdm  # which has no types
    is_abandoned = threading.Event()

    class Progress(base):  # type: ignore[misc] # as above
        def update(self, n: float | None = 1) -> Any:
            if is_abandoned.is_set():
                raise _AbandonedError
            return super().update(n)

    done = in_thread(lambda: download(Progress), "rustvllm-download")
    try:
        return done.result()
    except BaseException:
        is_abandoned.set()
        wait([done], _TIDY_SECONDS)
        raise


@contextmanager
def time_limit() -> Iterator[None]:
    """Give requests of the hub's client that may last for ever as long as the first one had."""
    from huggingface_hub import get_session

    seconds = envs.hub_timeout()
    with _time_limits:
        session = get_session()
        if session.timeout == type(session.timeout)(None):
            _unlimited.append(session)
            session.timeout = seconds
        _limited.append(session)
    try:
        yield
    finally:
        with _time_limits:
            _limited.remove(session)
            if session in _unlimited and session not in _limited:  # downloads of other threads may need it still
                _unlimited.remove(session)
                session.timeout = None
