"""What may have been meant by a model's name that leads nowhere: the embedded model, or a folder nearby."""

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
"""Of a folder whose names are compared."""
_MOST_LOOKED_INTO: Final = 8
"""Of those with similar names, the most similar first."""
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
        # Names first: to look into every folder takes long where they are large, or on another machine.
        by_name = {entry.name.lower(): entry for entry in islice(parent.iterdir(), _MOST_ENTRIES)}
        for match in get_close_matches(name.lower(), by_name, _MOST_LOOKED_INTO, _CLOSE):
            place = by_name[match]
            if _is_model(place):
                kind = "folder" if place.is_dir() else "file"
                return [f"the {kind} {place if place.is_absolute() or place.parts[0] == '..' else f'./{place}'}"]
    return []


def _is_model(place: Path) -> bool:
    if place.is_file():
        return is_gguf(place)
    return (place / "config.json").is_file() or next(place.glob("*.gguf"), None) is not None
