"""What may have been meant by a model's name that leads nowhere: the embedded model, or a folder nearby."""

from collections.abc import Iterator
from contextlib import suppress
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Final

from rustvllm.config.checkpoint.gguf_file import is_gguf

EMBEDDED_MODEL: Final = "rustvllm-tiny"
"""Name of the model inside the package, used when no name is given."""
_CALLED: Final = (EMBEDDED_MODEL, "tiny", "rustvllm", "embedded")
"""What people call it."""
_MOST_ENTRIES: Final = 1000
"""Of a folder that are looked at."""
_CLOSE: Final = 0.75
"""How alike two names must be, from 0 to 1."""


def suggestion(name: str) -> str:
    """A question that names what exists under a similar name; empty if nothing does."""
    owner, _, last = name.rstrip("/").rpartition("/")
    found = []
    with suppress(OSError, ValueError, RuntimeError):  # too long, contains a NUL, or ``~user`` of an unknown user
        found = _models_like(last, [Path(owner or ".").expanduser(), Path()])
    is_bare = owner in ("", ".", "rustvllm")
    if is_bare and get_close_matches(last.lower().replace("_", "-"), _CALLED, 1, _CLOSE):
        found.append(f"{EMBEDDED_MODEL}, the model inside the package")
    return f"Did you mean {' or '.join(found)}?" if found else ""


def _models_like(name: str, parents: list[Path]) -> list[str]:
    """At most one folder or GGUF file with a model, as it can be named."""
    for parent in parents:
        if not name or not parent.is_dir():
            continue
        by_name = {entry.name.lower(): entry for entry in _models_in(parent)}
        for match in get_close_matches(name.lower(), by_name, 1, _CLOSE):
            place = by_name[match]
            kind = "folder" if place.is_dir() else "file"
            return [f"the {kind} {place if place.is_absolute() or place.parts[0] == '..' else f'./{place}'}"]
    return []


def _models_in(parent: Path) -> Iterator[Path]:
    for entry in islice(parent.iterdir(), _MOST_ENTRIES):
        if entry.is_file():
            if is_gguf(entry):
                yield entry
        elif (entry / "config.json").is_file() or next(entry.glob("*.gguf"), None) is not None:
            yield entry
