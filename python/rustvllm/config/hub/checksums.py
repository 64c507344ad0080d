"""Compares files that have come from the hub with the SHA-256 that the hub gives for them.

huggingface_hub compares sizes alone: a file that a proxy or a disk has changed would be served as it is.

What was in the cache is not hashed at every start. Each file was compared when it came; to read all of them once more
would delay every start, by half a second per GiB at best and by as long as the disk takes at worst; and what changes
on the disk later is for the file system to notice.
"""

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rustvllm.byte_progress import ByteProgress
from rustvllm.config.hub.storage import HubFile, RepoStorage, is_sha256
from rustvllm.exceptions import ModelLoadError
from rustvllm.logger import init_logger

logger = init_logger(__name__)

_CHUNK_BYTES: Final = 4 << 20
WEIGHTS: Final = (".safetensors", ".gguf")


def check_files(storage: RepoStorage, repo_id: str, files: Sequence[tuple[Path, HubFile]]) -> None:
    """Hash files once and take out those with wrong bytes. Ctrl-C ends it between two pieces of a file.

    Args:
        storage: Of the repository.
        repo_id: Its full name.
        files: Each with its place; what the hub gives no hash for is named in the log.

    Raises:
        ModelLoadError: A file has another hash than the hub gives, and is removed; or it cannot be read.
    """
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled

    expected = [(path, file, file.sha256 or _hash_of_blob(path)) for path, file in files]
    if bare := [file.name for _, file, sha256 in expected if sha256 is None and file.name.endswith(WEIGHTS)]:
        logger.info("%s: the hub gives no SHA-256 for %s, so their bytes were not checked", repo_id, ", ".join(bare))
    total = sum(_size_of(path) for path, _, sha256 in expected if sha256 is not None)
    started = time.monotonic()
    wrong, num_checked = [], 0
    with ByteProgress("checking", repo_id, is_shown=not are_progress_bars_disabled()) as progress:
        progress.begin(total)
        for path, file, sha256 in expected:
            if sha256 is None:
                continue
            found, num_checked = _sha256_of(path, progress), num_checked + 1
            if found == sha256:
                storage.mark_checked(sha256)
            else:
                storage.remove(path)
                wrong.append(f"{file.name} has the SHA-256 {found}, but the hub says {sha256}")
    if wrong:
        raise ModelLoadError(
            f"{repo_id}: bytes of {'a file' if len(wrong) == 1 else f'{len(wrong)} files'} changed on the way from the "
            f"hub or on this disk: {'; '.join(wrong)}. rustvllm has removed {'it' if len(wrong) == 1 else 'them'} from "
            f"{storage.folder}. Start again to download anew; if it happens again, check the proxy and the disk"
        )
    if num_checked:
        logger.info(
            "%s: the SHA-256 of %s (%.1f MiB) is the hub's; checked in %.1f s",
            repo_id,
            "1 file" if num_checked == 1 else f"{num_checked} files",
            total / 2**20,
            time.monotonic() - started,
        )


def _hash_of_blob(path: Path) -> str | None:
    """The hash in the name of a file's place: the hub's ETag, where that is a SHA-256."""
    name = path.readlink().name if path.is_symlink() else ""
    return name if is_sha256(name) else None


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:  # another start has found it to be wrong meanwhile
        raise ModelLoadError(f"cannot read {path}: {error}. Start again to download it anew") from error


def _sha256_of(path: Path, progress: ByteProgress) -> str:
    digest, buffer = hashlib.sha256(), bytearray(_CHUNK_BYTES)
    view = memoryview(buffer)
    try:
        with path.open("rb", buffering=0) as opened:
            while count := opened.readinto(buffer):
                digest.update(view[:count])
                progress.advance(count)
    except OSError as error:
        raise ModelLoadError(
            f"cannot read {path}: {error}. Check the disk, and delete the file to have it downloaded anew"
        ) from error
    return digest.hexdigest()
