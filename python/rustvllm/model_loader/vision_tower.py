"""Builds and fills the vision tower of a model that sees images."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from rustvllm.byte_progress import ByteProgress
from rustvllm.exceptions import ModelLoadError
from rustvllm.logger import init_logger
from rustvllm.model_loader.checkpoint import FLOAT_DTYPES, MAX_NAMED, StoredTensor, read_headers
from rustvllm.model_loader.reading import TensorReader
from rustvllm.models.vision.tower import VisionTower, tower_name

if TYPE_CHECKING:
    from rustvllm.config import LoadConfig, ModelConfig
    from rustvllm.config.vision import VisionConfig

logger = init_logger(__name__)


def load_vision_tower(
    model_config: ModelConfig, vision: VisionConfig, load_config: LoadConfig, dtype: torch.dtype, available_memory: int
) -> VisionTower:
    """Build the vision tower of a model on the CPU and fill it.

    Args:
        model_config: Whose tower.
        vision: How the model sees images.
        load_config: From safetensors (``auto``, ``safetensors``) or at random (``dummy``).
        dtype: Of every parameter, whatever the checkpoint stores.
        available_memory: Bytes that are free.

    Raises:
        ModelLoadError: The configuration or a file is wrong, or the tower does not fit into memory.
    """
    started = time.monotonic()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=()), torch.inference_mode():
            torch.manual_seed(model_config.seed)
            tower = VisionTower(model_config.hf_config, vision, model_config.architecture).to(dtype)
    finally:
        torch.set_default_dtype(before)
    size = sum(parameter.nbytes for parameter in tower.parameters())
    if size > available_memory:
        raise ModelLoadError(
            f"{model_config.model} needs {size >> 20} MiB for its vision tower, but {available_memory >> 20} MiB are "
            "free: set dtype to bfloat16, or use a machine with more memory"
        )
    if load_config.load_format != "dummy":
        _fill(tower, model_config, is_shown=load_config.use_tqdm_on_load)
    logger.info(
        "loaded the vision tower of %s: %.1f MiB in %.1f s",
        model_config.model,
        size / 2**20,
        time.monotonic() - started,
    )
    return tower


def _fill(tower: VisionTower, model_config: ModelConfig, *, is_shown: bool) -> None:
    targets = tower.checkpoint_tensors()
    sources = {tower_name(name): tensor for name, tensor in read_headers(model_config.path).items()}
    problems = [
        problem
        for name, target in targets.items()
        if (problem := _problem(name, tuple(target.shape), sources.get(name))) is not None
    ]
    if problems:
        more = f" and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else ""
        raise ModelLoadError(
            f"{model_config.path}: the weights do not match the vision_config of config.json: "
            f"{'; '.join(problems[:MAX_NAMED])}{more}"
        )
    pairs = sorted(((sources[name], target) for name, target in targets.items()), key=lambda pair: _place(pair[0]))
    with ByteProgress("loading the vision tower of", model_config.model, is_shown=is_shown) as progress:
        progress.begin(sum(source.nbytes for source, _ in pairs))
        with TensorReader(progress) as reader, torch.inference_mode():
            for source, target in pairs:
                reader.read_into(source, target)


def _place(source: StoredTensor) -> tuple[str, int]:
    return str(source.file), source.offset


def _problem(name: str, shape: tuple[int, ...], source: StoredTensor | None) -> str | None:
    if source is None:
        return f"{name} is missing"
    if source.dtype not in FLOAT_DTYPES:
        return f"{source.name} is stored as {source.dtype}, and a vision tower must be stored as floating point"
    if source.shape != shape:
        return f"{source.name} has the shape {list(source.shape)}, expected {list(shape)}"
    return None
