"""Which files of a model's folder hold its weights."""

import json
from pathlib import Path
from typing import Final

from rustvllm.exceptions import ModelLoadError

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
MAX_INDEX_BYTES: Final = 256 << 20
MAX_NAMED: Final = 8
"""So many missing files are named in one message."""
_MAX_NAME: Final = 255
_PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold a checkpoint's weights: those of its index, else the one, else all there are.

    Raises:
        ModelLoadError: There are none, the index is not one, or a file that it names is missing.
    """
    index, single = folder / INDEX_NAME, folder / SINGLE_NAME
    if index.is_file():
        return _sharded_files(folder, index)
    if single.is_file():
        return [single]
    files = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    if files:
        return files
    if not folder.is_dir():
        raise ModelLoadError(f"{folder}: no such folder")
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ModelLoadError(
            f"{folder}: has {', '.join(pickles[:3])} but no *.safetensors; rustvllm only loads safetensors, because a "
            "pickle can run code. Save the model again with safetensors (transformers: save_pretrained)"
        )
    raise ModelLoadError(
        f"{folder}: no weights: expected {SINGLE_NAME} or {INDEX_NAME} (or --load-format dummy for random weights)"
    )


def _sharded_files(folder: Path, index: Path) -> list[Path]:
    size = index.stat().st_size
    if size > MAX_INDEX_BYTES:
        raise ModelLoadError(f"{index} has {size} bytes; the limit is {MAX_INDEX_BYTES}")
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelLoadError(
            f'{index}: not an index of shards, which is {{"weight_map": {{tensor: file}}}}: {error!r:.300}'
        ) from error
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ModelLoadError(f"{index}: weight_map must name files in the same folder, got {names[:3]}")
    missing = [name for name in names if not _is_file(folder / name)]
    if missing:
        raise ModelLoadError(
            f"{folder}: {len(missing)} of {len(names)} shards named in {INDEX_NAME} are missing: "
            f"{', '.join(name[:_MAX_NAME] for name in missing[:MAX_NAMED])}; download the model again"
        )
    return [folder / name for name in names]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # the name is too long, or a part of the path cannot be read
        return False
