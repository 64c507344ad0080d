"""Facts that must be equal on all ranks before they load: versions, a fingerprint of the model's files, and flags."""

import hashlib
import importlib.metadata
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

from rustvllm import _core
from rustvllm.config import EngineConfig
from rustvllm.config.hub.adapters import CONFIG_NAME, WEIGHTS_NAME

_FINGERPRINTS = {"model": "fingerprint of the model's files", "merge_lora": "fingerprint of the files of --merge-lora"}
_LONGEST_HEADER = 100 << 20
"""Most bytes of a safetensors header, as the safetensors library limits it."""
_GGUF_HEAD = 1 << 20
"""Bytes at the start of a GGUF file that its fingerprint covers."""


def start_facts(config: EngineConfig) -> dict[str, str]:
    """The facts of this process, by name, that each rank compares with rank 0's."""
    return {
        "rustvllm": _core.__version__,
        "torch": importlib.metadata.version("torch"),
        "model": model_fingerprint(config.model.path),
    }


def rank_facts(config: EngineConfig) -> dict[str, str]:
    """The facts above, and a digest of the files of adapters that each rank merges into its part of the weights."""
    digest = hashlib.sha256()
    for folder in map(Path, config.load.merge_lora):
        for file in (folder / CONFIG_NAME, folder / WEIGHTS_NAME):
            digest.update(_digest_of(file))
    return start_facts(config) | {"merge_lora": digest.hexdigest()[:16]}


def _digest_of(file: Path) -> bytes:
    """Of all bytes of a file, of which few are in memory at a time; empty if there is no file."""
    if not file.is_file():
        return b""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").digest()


def node_facts(config: EngineConfig) -> dict[str, str]:
    """What a node must have in common with the head: the facts above, the byte order, and some flags."""
    parallel, device = config.parallel, config.device
    return start_facts(config) | {
        "byte order": sys.byteorder,
        "nnodes": str(parallel.nnodes),
        "tensor_parallel_size": str(parallel.tensor_parallel_size),
        "pipeline_parallel_size": str(parallel.pipeline_parallel_size),
        "device": device.device,
        "dtype": config.model.dtype,
        "quantization": str(config.load.quantization),
        "kv_cache_dtype": config.cache.kv_cache_dtype,
        "block_size": str(config.cache.block_size),
        "batch_invariant": str(device.batch_invariant),
    }


def node_difference(theirs: Mapping[str, str], node: str, own: Mapping[str, str], head: str) -> str | None:
    """Describe the first fact in which a node differs from the head, with both values; None if all are equal.

    Args:
        theirs: The node's facts.
        node: The node's name in messages.
        own: The head's facts.
        head: The head's name in messages.
    """
    if (name := _first_unlike(theirs, own)) is None:
        return None
    what = "model (a fingerprint of its files)" if name == "model" else name
    return (
        f"{node} has {what} {theirs.get(name)}, {head} has {own[name]}: use the same installation, model and flags on "
        "every node"
    )


def difference(own: Mapping[str, str], theirs: Mapping[str, str], rank: int) -> str | None:
    """Describe the first fact in which a rank differs from rank 0, with both values; None if all are equal.

    Args:
        own: The facts of the rank that calls this.
        theirs: Rank 0's facts.
        rank: The number of the rank that calls this.
    """
    if (name := _first_unlike(own, theirs)) is None:
        return None
    what = _FINGERPRINTS.get(name, name)
    return (
        f"worker rank {rank} has another {what} than rank 0: {own.get(name)} and {theirs[name]}; use the same "
        "installation and model for all ranks"
    )


def _first_unlike(facts: Mapping[str, str], wanted: Mapping[str, str]) -> str | None:
    return next((name for name, value in wanted.items() if facts.get(name) != value), None)


def model_fingerprint(path: Path) -> str:
    """Hash a model's configuration, its index, and the header and size of each weight file; 16 hexadecimal digits.

    Args:
        path: The model's folder, or a GGUF file, whose first MiB and size are hashed. A missing file counts as empty.
    """
    digest = hashlib.sha256()
    if path.is_file():
        with path.open("rb") as file:
            digest.update(file.read(_GGUF_HEAD))
        digest.update(struct.pack("<Q", path.stat().st_size))
        return digest.hexdigest()[:16]
    names = sorted(each.name for each in path.glob("*.safetensors")) if path.is_dir() else []
    for name in ("config.json", "model.safetensors.index.json", *names):
        file_path = path / name
        digest.update(name.encode() + b"\0")
        if not file_path.is_file():
            continue
        with file_path.open("rb") as file:
            if name.endswith(".safetensors"):
                size = file.read(8)
                digest.update(size + file.read(min(int.from_bytes(size, "little"), _LONGEST_HEADER)))
                digest.update(struct.pack("<Q", file_path.stat().st_size))
            else:
                digest.update(file.read())
    return digest.hexdigest()[:16]
