"""Pointers of git-lfs: what a clone holds in place of a model's large files if git-lfs was not installed."""

from contextlib import suppress
from pathlib import Path
from typing import Final

_BEGINNING: Final = b"version https://git-lfs.github.com/spec/"


def what_to_do(file: Path, otherwise: str = "") -> str:
    """The end of an error over a file that cannot be read: what it is if it is a pointer, ``otherwise`` if not."""
    with suppress(OSError), file.open("rb") as opened:
        if opened.read(len(_BEGINNING)) == _BEGINNING:
            return "; it is a pointer of git-lfs and not the file itself: run `git lfs pull` in its folder"
    return otherwise
