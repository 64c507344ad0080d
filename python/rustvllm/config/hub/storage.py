"""``RepoStorage``: the folder of one repository in the hub's cache, which huggingface_hub and rustvllm both write.

huggingface_hub lays it out: ``blobs/HASH`` are the files, ``snapshots/COMMIT/NAME`` are links to them, and
``refs/REVISION`` says which commit a branch or tag was. rustvllm adds ``unchecked/SHA256``, an empty file for every
file whose bytes have not been compared with that hash yet, so that a check that was interrupted is done by the next
start.
"""

import os
import re
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Final

from rustvllm.logger import init_logger

logger = init_logger(__name__)

_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_LEFTOVER: Final = re.compile(r"(.+)\.[0-9a-f]{8}\.incomplete")
"""A file on its way from the hub; its name is its own, so no later download goes on with it."""
_LEFTOVER_SECONDS: Final = 600.0
"""A file on its way that was not written to for so long is not on its way any more."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository, as the hub lists it.

    Attributes:
        name: Relative to the repository.
        size: bytes; None: the hub does not say.
        sha256: Of its content, in hexadecimal digits; None: the hub gives none.
    """

    name: str
    size: int | None = None
    sha256: str | None = None


class RepoStorage:
    """See the module.

    Args:
        cache: Of the hub, or the folder to use in its place.
        repo_id: Full name of the repository.
    """

    def __init__(self, cache: Path, repo_id: str) -> None:
        self._cache = cache.expanduser().resolve()
        self._name = folder_name(repo_id)
        self.folder = self._cache / self._name

    def snapshot(self, commit: str) -> Path:
        """The folder of a commit."""
        return self.folder / "snapshots" / commit

    def has(self, commit: str, file: HubFile) -> bool:
        """Whether a file need not be fetched; what has another size than the hub says is taken out first.

        A text that was edited in the cache keeps its place: only files with a hash are compared.
        """
        path = self.snapshot(commit) / file.name
        if not path.is_file() and file.sha256 is not None:
            path = self.folder / "blobs" / file.sha256  # of another commit
        if not path.is_file():
            return False
        if file.sha256 is None or file.size is None or (size := path.stat().st_size) == file.size:
            return True
        logger.warning(
            "%s has %d bytes, but the hub says %d: removing it from the cache, to download it anew",
            path,
            size,
            file.size,
        )
        self.remove(path)
        return False

    def remove(self, path: Path) -> None:
        """Take out a file, and what it is a link to; a file outside of this folder that a user linked to stays."""
        while path.is_symlink():
            target = path.parent / path.readlink()
            path.unlink(missing_ok=True)
            if not self._has_folder(target.parent):
                return
            path = target
        path.unlink(missing_ok=True)

    def _has_folder(self, folder: Path) -> bool:
        own = (self.folder.resolve(), (self.folder / "blobs").resolve())  # which may be on another disk
        return any(folder.resolve().is_relative_to(each) for each in own)

    def mark_unchecked(self, hashes: Iterable[str]) -> None:
        """Note that the files of these hashes have not been compared with them yet."""
        for each in hashes:
            mark = self.folder / "unchecked" / each
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()

    def is_unchecked(self, sha256: str) -> bool:
        """Whether ``mark_unchecked`` was called, here or by another process, and ``mark_checked`` not yet."""
        return (self.folder / "unchecked" / sha256).exists()

    def mark_checked(self, sha256: str) -> None:
        """Note that a file has its hash; a cache that cannot be written to keeps the mark."""
        with suppress(OSError):
            (self.folder / "unchecked" / sha256).unlink(missing_ok=True)
            (self.folder / "unchecked").rmdir()  # unless there are others

    def unchecked_files(self, snapshot: Path) -> list[tuple[Path, HubFile]]:
        """The files of a commit's folder that are marked, for when the hub cannot be asked for their hashes."""
        if not (self.folder / "unchecked").is_dir():
            return []
        files = [path for path in snapshot.rglob("*") if path.is_file()]
        blobs = [(path, path.parent / path.readlink()) for path in files if path.is_symlink()]
        return [
            (path, HubFile(path.relative_to(snapshot).as_posix(), sha256=blob.name))
            for path, blob in blobs
            if self.is_unchecked(blob.name)
        ]

    def note_revision(self, revision: str, commit: str, *, replace: bool = True) -> None:
        """Note which commit a branch or tag is, for when the hub cannot be asked.

        huggingface_hub would do so before it fetches: after a download that was broken off, the copy of the commit
        before could not be found any more.

        Args:
            revision: The branch or tag; a commit needs no note.
            commit: What it is.
            replace: False leaves the note that there is.
        """
        place = Path(revision)
        if revision == commit or place.is_absolute() or ".." in place.parts:
            return
        ref = self.folder / "refs" / place
        with suppress(OSError):  # of a cache that cannot be written to
            if ref.is_file() and (not replace or ref.read_text(encoding="utf-8") == commit):
                return
            ref.parent.mkdir(parents=True, exist_ok=True)
            new = ref.with_name(f"{ref.name}.{os.getpid()}.tmp")
            new.write_text(commit, encoding="utf-8")
            new.replace(ref)

    def remove_leftovers(self) -> None:
        """Take out what downloads left that were killed; one that is still going on keeps its file."""
        for path in self.folder.glob("blobs/*.incomplete"):
            match = _LEFTOVER.fullmatch(path.name)
            with suppress(OSError):
                if match is None or time.time() - path.stat().st_mtime < _LEFTOVER_SECONDS:
                    continue
                lock = self._cache / ".locks" / self._name / f"{match[1]}.lock"
                with lock.open("r+b") as opened:
                    flock(opened, LOCK_EX | LOCK_NB)
                    path.unlink()

    def free_bytes(self) -> int | None:
        """What there is room for; None: the system does not say."""
        for folder in (self.folder, *self.folder.parents):
            if folder.is_dir():
                with suppress(OSError):
                    return shutil.disk_usage(folder).free
                break
        return None


def is_sha256(text: str | None) -> bool:
    """Whether a text can be the SHA-256 of a file."""
    return text is not None and _SHA256.fullmatch(text) is not None


def folder_name(repo_id: str) -> str:
    """What huggingface_hub calls the folder of a repository."""
    return "models--" + repo_id.replace("/", "--")


def is_snapshot_of(folder: Path, repo_id: str) -> bool:
    """Whether a folder is that of a commit of a repository, in any cache; the hub may spell its name otherwise."""
    return folder.parent.name == "snapshots" and folder.parent.parent.name.lower() == folder_name(repo_id).lower()
