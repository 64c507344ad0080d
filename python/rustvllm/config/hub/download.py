"""Fetches files from the hub so that a download can be interrupted, and a hub that falls silent is given up.

huggingface_hub does the fetching. Left alone, it waits for ever for answers about a repository, and Ctrl-C only takes
effect when the file that is on its way has come.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rustvllm import envs
from rustvllm.logger import mask_library

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

_LIBRARY: Final = "huggingface_hub"
_CALLER: Final = "rustvllm"
"""Who asks, for the hub's statistics."""


class _AbandonedError(Exception):
    """Ends the thread of a download whose caller has gone."""


def model_info(repo_id: str, revision: str | None) -> "ModelInfo":
    """What the hub says of a model: its commit and the names of its files. It has ``RUSTVLLM_HUB_TIMEOUT`` seconds."""
    from huggingface_hub import HfApi

    return HfApi(library_name=_CALLER).model_info(repo_id, revision=revision, timeout=envs.hub_timeout())


def fetch(
    repo_id: str,
    revision: str | None,
    download_dir: Path | None,
    patterns: Sequence[str],
    ignored: Sequence[str] = (),
    *,
    local_files_only: bool,
) -> Path:
    """The folder of a repository at a revision, with the files of these names.

    Args:
        repo_id: Full name.
        revision: Branch, tag or commit; None: the main branch.
        download_dir: Where to keep what is fetched; None: in the hub's cache.
        patterns: Of the names of the files, relative to the repository.
        ignored: Patterns of files to leave out nevertheless.
        local_files_only: Look into the cache alone.

    Raises:
        Exception: Whatever the hub's client raises.
    """
    from huggingface_hub import snapshot_download

    def download(tqdm_class: type[Any] | None = None) -> Path:
        folder = snapshot_download(
            repo_id,
            revision=revision,
            cache_dir=None if download_dir is None else str(download_dir),
            allow_patterns=list(patterns),
            ignore_patterns=list(ignored),
            library_name=_CALLER,
            local_files_only=local_files_only,
            tqdm_class=tqdm_class,
        )
        return Path(folder)

    if local_files_only:
        return download()
    mask_library(_LIBRARY)  # its warnings have the signed addresses of files
    with time_limit():
        return _interruptible(download)


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

    done: Future[Path] = Future()

    def run() -> None:
        try:
            done.set_result(download(Progress))
        except BaseException as error:  # noqa: BLE001 -- raised where it is waited for
            done.set_exception(error)

    threading.Thread(target=run, name="rustvllm-download", daemon=True).start()
    try:
        return done.result()
    except BaseException:
        is_abandoned.set()
        raise


@contextmanager
def time_limit() -> Iterator[None]:
    """Give requests of the hub's client that may last for ever as long as the first one had."""
    from huggingface_hub import get_session

    session = get_session()
    before = session.timeout
    if before == type(before)(None):
        session.timeout = envs.hub_timeout()
    try:
        yield
    finally:
        session.timeout = before
