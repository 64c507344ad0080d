"""Builds a model and fills it, from safetensors or with seeded random numbers.

Everything a checkpoint can be wrong about is found in the files' headers before the first weight is read, and what a
model takes is known before its memory is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rustvllm.exceptions import ModelLoadError
from rustvllm.layers.cpu_linear_packer import LinearPacker
from rustvllm.logger import init_logger
from rustvllm.model_loader.checkpoint import read_headers
from rustvllm.model_loader.dummy_weights import fill_dummy_weights
from rustvllm.model_loader.filling import fill_from_checkpoint
from rustvllm.model_loader.progress import LoadProgress
from rustvllm.models.interface import CausalLM
from rustvllm.models.registry import make_model

if TYPE_CHECKING:
    from rustvllm.config import LoadConfig, ModelConfig

logger = init_logger(__name__)


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
    stored = None if load_config.load_format == "dummy" else read_headers(model_config.path)
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
    packer = None if make_packer is None else make_packer(outline)
    size = sum(parameter.nbytes for parameter in outline.parameters())
    if packer is not None:
        size = packer.resident_bytes(size)
    if size > available_memory:
        raise ModelLoadError(_too_large(model_config.model, outline, size, available_memory, dtype, device))
    with _defaults(dtype, device):
        model = build()
    if packer is not None:
        packer.watch(model, model.tied_embedding)
    filled: Callable[[Tensor], None] = (lambda _: None) if packer is None else packer.filled
    with torch.inference_mode():
        if stored is None:
            fill_dummy_weights(model, model_config.seed, filled)
        else:
            with LoadProgress(model_config.model, is_shown=load_config.use_tqdm_on_load) as progress:
                fill_from_checkpoint(model, model_config.path, stored, filled, progress)
        if packer is not None:
            model.head_kernel = packer.finish(model, model.tied_embedding)
        model.check_filled()
    logger.info("loaded %s: %.1f MiB in %.1f s", model_config.model, size / 2**20, time.monotonic() - started)
    return model.eval()


def _too_large(
    name: str, outline: CausalLM, size: int, available: int, dtype: torch.dtype, device: torch.device
) -> str:
    """What to say of a model that does not fit: by how much, and what would."""
    num_parameters = sum(parameter.numel() for parameter in outline.parameters())
    advice = []
    if dtype.itemsize > 2:
        half = 2 * num_parameters
        verdict = "fits" if half <= available else f"is {half - available} bytes too much, too"
        advice.append(f"--dtype bfloat16 takes {half} bytes ({_gib(half)}), which {verdict}")
    if device.type == "cpu":
        small = num_parameters
        verdict = "may fit" if small <= available else "is too much, too"
        advice.append(f"--quantization int8 takes about {small} bytes, which {verdict}")
    advice.append(f"else a model of at most {available // dtype.itemsize} parameters, or more memory")
    return (
        f"{name}: the parameters take {size} bytes in {str(dtype).removeprefix('torch.')} ({_gib(size)}), but "
        f"{available} bytes are free on {device} ({_gib(available)}): {size - available} bytes too much; "
        f"{'; '.join(advice)}"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


@contextmanager
def _defaults(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)
