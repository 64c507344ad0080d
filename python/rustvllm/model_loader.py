"""Builds a model and fills it: from safetensors, tensor by tensor, or with seeded random numbers.

Everything a checkpoint can be wrong about is checked from the files' headers before the first weight is read. Weights
go straight into parameters that already lie on the device in the right dtype, so the largest thing that exists twice is
one tensor.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rustvllm.exceptions import ModelLoadError
from rustvllm.layers.cpu_linear_packer import LinearPacker
from rustvllm.layers.linear import Embedding, Linear
from rustvllm.logger import init_logger
from rustvllm.models.interface import CausalLM
from rustvllm.models.registry import make_model

if TYPE_CHECKING:
    from rustvllm.config import LoadConfig, ModelConfig

logger = init_logger(__name__)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
HEAD_NAME = "lm_head.weight"
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_MAX_PROBLEMS = 8


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    file: Path
    name: str  # as stored, with its prefix
    shape: tuple[int, ...]
    dtype: str


def load_model(
    model_config: ModelConfig,
    load_config: LoadConfig,
    dtype: torch.dtype,
    device: torch.device,
    available_memory: int,
    make_packer: Callable[[CausalLM], LinearPacker] | None = None,
) -> CausalLM:
    """Build the model of a configuration on a device and fill it.

    Args:
        model_config: which architecture, from where, for how long sequences.
        load_config: from safetensors (``auto``, ``safetensors``) or at random (``dummy``).
        dtype: of every parameter, whatever the checkpoint stores.
        device: where the parameters lie.
        available_memory: bytes that are free there.
        make_packer: given the model without memory, what packs its dense layers as they are filled; None: nothing.

    Raises:
        ModelLoadError: the configuration or a file is wrong; the message names the file, the tensor, what was expected
            and what was found.
    """
    started = time.monotonic()
    build = make_model(model_config)
    stored = None if load_config.load_format == "dummy" else _read_headers(model_config.path)
    # On the meta device a model takes no memory: what it needs is known before it is taken.
    with _defaults(dtype, torch.device("meta")):
        outline = build()
    limit = outline.max_positions
    if limit is not None and model_config.max_model_len > limit:
        # Beyond it the position table would be read out of bounds.
        raise ModelLoadError(
            f"max_model_len is {model_config.max_model_len}, but {model_config.architecture} was made for {limit} "
            f"positions; set --max-model-len {limit} or less"
        )
    size = sum(parameter.nbytes for parameter in outline.parameters())
    packer = None if make_packer is None else make_packer(outline)
    if packer is not None:
        size = packer.resident_bytes(size)
    if size > available_memory:
        raise ModelLoadError(
            f"{model_config.model}: the parameters take {size} bytes in {str(dtype).removeprefix('torch.')}, but "
            f"{available_memory} bytes are free on {device}; use a smaller dtype, a smaller model or more memory"
        )
    with _defaults(dtype, device):
        model = build()
    if packer is not None:
        packer.watch(model, _tied_embedding(model))
    filled = (lambda _: None) if packer is None else packer.filled
    with torch.inference_mode():
        if stored is None:
            fill_dummy_weights(model, model_config.seed, filled)
        else:
            _fill_from_checkpoint(model, model_config.path, stored, filled)
        model.check_filled()
        if packer is not None:
            model.head_kernel = packer.finish(model, _tied_embedding(model))
    logger.info("loaded %s: %.1f MiB in %.1f s", model_config.model, size / 2**20, time.monotonic() - started)
    return model.eval()


def fill_dummy_weights(model: CausalLM, seed: int, filled: Callable[[Tensor], None] = lambda _: None) -> None:
    """Fill every parameter with random numbers that depend on the seed and the parameter's name only.

    The scales keep activations near one and let the blocks outweigh the embedding, so that what is generated is
    diverse: at the scales of a freshly initialised model it mostly repeats one token.

    Args:
        model: whose parameters have memory.
        seed: any integer.
        filled: is told of every parameter that has its values.
    """
    scales: dict[str, float] = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            scales[f"{name}.weight"] = 1.5 * module.weight.shape[1] ** -0.5
        elif isinstance(module, Embedding):
            scales[f"{name}.weight"] = 0.05
    # By name: a list of them would keep the memory of those that are packed meanwhile.
    for name in [name for name, _ in model.named_parameters()]:
        parameter = model.get_parameter(name)
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu")
        if name in scales:
            parameter.copy_(noise.mul_(scales[name]))
        else:  # vectors: a norm's weight is near one, a bias near zero
            parameter.copy_(noise.mul_(0.05).add_(1.0 if name.endswith("weight") else 0.0))
        filled(parameter)


def _tied_embedding(model: CausalLM) -> Tensor | None:
    return model.embed_tokens.weight if model.lm_head is None else None


@contextmanager
def _defaults(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def _read_headers(folder: Path) -> dict[str, _StoredTensor]:
    """Name, shape and dtype of every tensor of a checkpoint; no weight is read.

    Raises:
        ModelLoadError: no safetensors, a shard is missing, a file is truncated or no safetensors file, a name is in
            two files.
    """
    tensors: dict[str, _StoredTensor] = {}
    for file in _checkpoint_files(folder):
        for tensor in _read_header(file):
            if tensor.name in tensors:
                raise ModelLoadError(
                    f"{folder}: tensor {tensor.name!r} is in {tensors[tensor.name].file.name} and in {file.name}"
                )
            tensors[tensor.name] = tensor
    return tensors


def _checkpoint_files(folder: Path) -> list[Path]:
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
            f"{folder}: has {', '.join(pickles[:3])} but no *.safetensors; only safetensors are loaded, because a "
            "pickle can run code. Save the model again with safetensors (transformers: save_pretrained)"
        )
    raise ModelLoadError(
        f"{folder}: no weights: expected {SINGLE_NAME} or {INDEX_NAME} (or --load-format dummy for random weights)"
    )


def _sharded_files(folder: Path, index: Path) -> list[Path]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(
            f'{index}: not an index of shards, expected {{"weight_map": {{tensor: file}}}}: {error!r}'
        ) from error
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ModelLoadError(f"{index}: weight_map must name files of the same folder, got {names[:3]}")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelLoadError(
            f"{folder}: {len(missing)} of {len(names)} shards named in {INDEX_NAME} are missing: "
            f"{', '.join(missing[:_MAX_PROBLEMS])}; fetch the model again"
        )
    return [folder / name for name in names]


def _read_header(file: Path) -> list[_StoredTensor]:
    with _open(file) as handle:
        stored = []
        for name in handle.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118 - not a mapping
            part = handle.get_slice(name)  # type: ignore[no-untyped-call]
            stored.append(_StoredTensor(file, name, tuple(part.get_shape()), part.get_dtype()))
        return stored


@contextmanager
def _open(file: Path) -> Iterator[safe_open]:
    try:
        with safe_open(file, framework="pt", device="cpu") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(
            f"{file}: not a whole safetensors file ({file.stat().st_size if file.is_file() else 0} bytes): {error}; "
            "it is truncated or damaged, fetch it again"
        ) from error


def _fill_from_checkpoint(
    model: CausalLM, folder: Path, stored: dict[str, _StoredTensor], filled: Callable[[Tensor], None]
) -> None:
    sources = _without_prefix(model, folder, stored)
    targets = model.checkpoint_tensors()
    if model.lm_head is not None:
        targets[HEAD_NAME] = model.lm_head.weight
    doubles = {}
    for alias, name in model.tied_tensors().items():
        if alias not in sources:
            continue
        if name in sources:
            doubles[alias] = sources.pop(alias)
        else:  # tied, and saved under this name only
            sources[name] = sources.pop(alias)
    _check(model, folder, sources, targets)
    kept = set(model.tied_tensors().values())

    for name, tensor in sorted(sources.items(), key=lambda item: (item[1].file, item[0])):
        targets[name].copy_(_read(tensor))
        filled(targets[name])
        if name not in kept:
            del targets[name]  # a packed weight's memory goes with the last view of it
    for alias, tensor in doubles.items():
        _reconcile(model, folder, alias, targets[model.tied_tensors()[alias]], tensor)


def _reconcile(model: CausalLM, folder: Path, alias: str, target: Tensor, stored: _StoredTensor) -> None:
    """A tied tensor is stored twice: both must be the same, or each is kept."""
    if stored.shape != tuple(target.shape):
        raise ModelLoadError(
            f"{stored.file}: tensor {stored.name!r} has shape {list(stored.shape)}, expected {list(target.shape)}"
        )
    value = _read(stored).to(device=target.device, dtype=target.dtype)
    if not torch.equal(value, target):
        logger.warning("%s: %s is tied by config.json, but stored with other values; both are kept", folder, alias)
        model.untie(alias).copy_(value)


def _without_prefix(model: CausalLM, folder: Path, stored: dict[str, _StoredTensor]) -> dict[str, _StoredTensor]:
    sources: dict[str, _StoredTensor] = {}
    for name, tensor in stored.items():
        renamed = model.checkpoint_name(name)
        bare = next((renamed.removeprefix(prefix) for prefix in model.prefixes if renamed.startswith(prefix)), renamed)
        if model.is_ignored(bare):
            continue
        bare = HEAD_NAME if bare == model.head_name else bare
        if bare in sources:
            raise ModelLoadError(f"{folder}: tensors {name!r} and {sources[bare].name!r} are the same one twice")
        sources[bare] = tensor
    return sources


def _check(model: CausalLM, folder: Path, sources: dict[str, _StoredTensor], targets: dict[str, Tensor]) -> None:
    """Refuse a checkpoint whose tensors are not exactly the model's.

    Raises:
        ModelLoadError: tensors are missing, unexpected, of another shape or of no floating-point dtype.
    """
    problems = [
        f"{tensor.file.name}: tensor {tensor.name!r} has shape {list(tensor.shape)}, expected "
        f"{list(targets[name].shape)}"
        for name, tensor in sources.items()
        if name in targets and tensor.shape != tuple(targets[name].shape)
    ]
    problems += [
        f"{tensor.file.name}: tensor {tensor.name!r} has dtype {tensor.dtype}, supported: {', '.join(FLOAT_DTYPES)}"
        for name, tensor in sources.items()
        if name in targets and tensor.dtype not in FLOAT_DTYPES
    ]
    problems += [f"tensor {name!r} is missing" for name in targets if name not in sources]
    problems += [
        f"{tensor.file.name}: tensor {tensor.name!r} is unexpected"
        for name, tensor in sources.items()
        if name not in targets
    ]
    if not problems:
        return
    more = f"; and {len(problems) - _MAX_PROBLEMS} more" if len(problems) > _MAX_PROBLEMS else ""
    raise ModelLoadError(
        f"{folder}: the weights do not fit a {type(model).__name__} of this config.json: "
        f"{'; '.join(problems[:_MAX_PROBLEMS])}{more}"
    )


def _read(tensor: _StoredTensor) -> Tensor:
    # Opened once per tensor: closing the file also gives back the pages that were mapped for it.
    with _open(tensor.file) as handle:
        value: Tensor = handle.get_tensor(tensor.name)  # type: ignore[no-untyped-call]
        return value
