"""What ranks must agree on before they load: version, torch, and the model's files by a fingerprint of their heads."""

import hashlib
import importlib.metadata
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

from rustvllm import _core
from rustvllm.config import EngineConfig

_LONGEST_HEADER = 100 << 20
"""Bytes of a header at most, as safetensors has it."""
_GGUF_HEAD = 1 << 20


def start_facts(config: EngineConfig) -> dict[str, str]:
    """The facts of this process, by name, as the ranks compare them."""
    return {
        "rustvllm": _core.__version__,
        "torch": importlib.metadata.version("torch"),
        "model": model_fingerprint(config.model.path),
    }


def node_facts(config: EngineConfig) -> dict[str, str]:
    """What a node has in its own way and must have like the head: the facts above, its byte order, and its flags."""
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
    """The first fact in which a node differs from the head, with both values; None: there is none.

    Args:
        theirs: Of the node.
        node: What messages call it.
        own: Of the head.
        head: What messages call that.
    """
    if (name := _first_unlike(theirs, own)) is None:
        return None
    what = "model (a fingerprint of its files)" if name == "model" else name
    return (
        f"{node} has {what} {theirs.get(name)}, {head} has {own[name]}: install the same, load the same and give "
        "the same flags on every node"
    )


def difference(own: Mapping[str, str], theirs: Mapping[str, str], rank: int) -> str | None:
    """The first fact in which a rank differs from rank 0, with both values; None: there is none.

    Args:
        own: Of the rank that asks.
        theirs: Of rank 0.
        rank: Which one asks.
    """
    if (name := _first_unlike(own, theirs)) is None:
        return None
    what = "fingerprint of the model's files" if name == "model" else name
    return (
        f"worker rank {rank} has another {what} than rank 0: {own.get(name)} and {theirs[name]}; install and load the "
        "same everywhere"
    )


def _first_unlike(facts: Mapping[str, str], wanted: Mapping[str, str]) -> str | None:
    return next((name for name, value in wanted.items() if facts.get(name) != value), None)


def model_fingerprint(path: Path) -> str:
    """Sixteen hexadecimal digits of a model's configuration, index and the header of each file of weights.

    Args:
        path: Its folder, or a GGUF file. What is not there counts as empty.
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
