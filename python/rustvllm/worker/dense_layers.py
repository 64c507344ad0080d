"""What computes a model's dense layers, from what was asked for, what is stored and what memory allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rustvllm import _core, envs
from rustvllm.config import STORED_QUANTIZATIONS
from rustvllm.exceptions import ConfigError, ModelLoadError
from rustvllm.layers.cpu.linear import OneDnnLinear, WeightKind
from rustvllm.layers.cpu.packer import LinearOptions, LinearPacker

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from rustvllm.config import EngineConfig
    from rustvllm.model_loader.filling import LayerPacker
    from rustvllm.models.interface import CausalLM

MOST_RESIDENT = 1.35
"""A model takes at most so many times its checkpoint's bytes, packed copies included."""
_STORED_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def make_linear_packer(
    config: EngineConfig, outline: CausalLM, dtype: torch.dtype, threads: _core.CpuThreads
) -> LinearPacker:
    """The packer of a model that is to be loaded.

    Args:
        config: Of the engine.
        outline: The model, perhaps without memory.
        dtype: Of its parameters.
        threads: Which compute.

    Raises:
        ConfigError: The environment asks for a kernel that cannot do what the configuration asks for.
    """
    options = linear_options(config.load.quantization, dtype, batch_invariant=config.device.batch_invariant)
    plain = sum(parameter.nbytes for parameter in outline.parameters())
    stored = plain // dtype.itemsize * _stored_itemsize(config.model.hf_config, dtype)
    return LinearPacker(threads, options, outline, outline.tied_embedding, int(MOST_RESIDENT * stored) - plain)


def make_device_packer(outline: CausalLM, device: torch.device) -> LayerPacker:
    """What keeps the whole numbers of a quantised checkpoint on a GPU that has Triton.

    Args:
        outline: The model, perhaps without memory.
        device: Where it computes.
    """
    from rustvllm.layers.gpu.quantized import DeviceLayers

    return DeviceLayers(outline, device)


def make_batch_invariant(model: CausalLM) -> None:
    """Replace the dense layers of a filled model on a GPU by products that compute each row independently.

    Raises:
        ModelLoadError: It has dense layers that are not ours.
    """
    from rustvllm.layers.gpu.linear import TritonLinear, use_triton

    strangers = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    if strangers:
        raise ModelLoadError(
            f"batch_invariant is set, but this model's {strangers[0]} and {len(strangers) - 1} other dense layers are "
            "torch's, which sum in an order that depends on the batch: leave batch_invariant out"
        )
    use_triton(model)
    if model.tied_embedding is not None:
        model.head_kernel = TritonLinear(model.tied_embedding, None)


def linear_options(quantization: str | None, dtype: torch.dtype, *, batch_invariant: bool) -> LinearOptions:
    """What flags and environment ask of the dense layers.

    Args:
        quantization: A name out of ``config.QUANTIZATIONS``, or None.
        dtype: Of the parameters.
        batch_invariant: A row's result may not depend on the others.

    Raises:
        ConfigError: They contradict each other, or what is asked for is not there.
    """
    forced = envs.linear_kernel()
    if quantization in STORED_QUANTIZATIONS:  # what is stored decides, layer by layer
        quantization = None
    reason = f"quantization {quantization}" if quantization else "batch_invariant" if batch_invariant else None
    if forced not in (None, "core") and reason:
        raise ConfigError(
            f"RUSTVLLM_LINEAR_KERNEL is {forced}, but {reason} needs the core's kernels: unset the variable"
        )
    if forced == "onednn" and not OneDnnLinear.is_available(dtype):
        raise ConfigError(
            f"RUSTVLLM_LINEAR_KERNEL is onednn, but torch {torch.__version__} has no oneDNN products in "
            f"{str(dtype).removeprefix('torch.')}: unset the variable"
        )
    if forced == "core" and dtype == torch.float16:
        raise ConfigError(
            "RUSTVLLM_LINEAR_KERNEL is core, which computes in float32 and bfloat16, but dtype is float16: unset the "
            "variable, or set dtype to float32 or bfloat16"
        )
    envs.cpu_instructions()  # the core takes no value that it does not know
    matrix_unit, rounded = not batch_invariant, envs.activations() != "float"
    if quantization is not None:
        name, _, group_size = quantization.partition("-g")
        kind: WeightKind = "int4" if name == "int4" else "int8"
        groups = int(group_size) if group_size else None
        return LinearOptions("core", kind, groups, matrix_unit=matrix_unit, round_activations=rounded)
    kernel = "core" if batch_invariant else forced
    return LinearOptions(kernel, matrix_unit=matrix_unit, round_activations=rounded)


def _stored_itemsize(hf_config: Mapping[str, Any], dtype: torch.dtype) -> int:
    stored = hf_config.get("dtype") or hf_config.get("torch_dtype")
    return _STORED_BYTES.get(str(stored).removeprefix("torch."), dtype.itemsize)
