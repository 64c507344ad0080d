"""Chooses what computes a model's dense layers, from the flags, the checkpoint and the memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rustvllm import _core, envs
from rustvllm.config import STORED_QUANTIZATIONS
from rustvllm.exceptions import ConfigError, ModelLoadError
from rustvllm.layers.cpu.linear import OneDnnLinear, WeightKind
from rustvllm.layers.cpu.options import LinearOptions
from rustvllm.layers.cpu.packer import LinearPacker

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from rustvllm.config import EngineConfig
    from rustvllm.model_loader.filling import LayerPacker
    from rustvllm.models.interface import CausalLM

MOST_RESIDENT = 1.35
"""The memory of a model, packed copies included, is at most this many times its checkpoint's bytes."""
_STORED_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def make_linear_packer(
    config: EngineConfig, outline: CausalLM, dtype: torch.dtype, threads: _core.CpuThreads
) -> LinearPacker:
    """The packer for a model that is about to be loaded.

    Args:
        config: The engine's configuration.
        outline: The model, which may have no memory yet.
        dtype: The dtype of its parameters.
        threads: The threads that compute.

    Raises:
        ConfigError: The environment requires a kernel that cannot do what the configuration requires.
    """
    options = linear_options(config.load.quantization, dtype, batch_invariant=config.device.batch_invariant)
    plain = sum(parameter.nbytes for parameter in outline.parameters())
    stored = plain // dtype.itemsize * _stored_itemsize(config.model.hf_config, dtype)
    return LinearPacker(threads, options, outline, outline.tied_embedding, int(MOST_RESIDENT * stored) - plain)


def make_device_packer(outline: CausalLM, device: torch.device) -> LayerPacker:
    """The packer that keeps a checkpoint's quantized weights as integers, on a GPU with Triton.

    Args:
        outline: The model, which may have no memory yet.
        device: The device that computes.
    """
    from rustvllm.layers.gpu.quantized import DeviceLayers

    return DeviceLayers(outline, device)


def make_batch_invariant(model: CausalLM) -> None:
    """Replace the dense layers of a loaded model on a GPU with products that compute each row independently.

    Raises:
        ModelLoadError: Some dense layers are torch's and cannot be replaced.
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
    """The options of the dense layers that flags and environment ask for.

    Args:
        quantization: A name from ``config.QUANTIZATIONS``, or None.
        dtype: The dtype of the parameters.
        batch_invariant: Whether a row's result must not depend on other rows.

    Raises:
        ConfigError: Flags and environment contradict each other, or the required kernel is not available.
    """
    forced = envs.linear_kernel()
    if quantization in STORED_QUANTIZATIONS:  # the checkpoint decides, layer by layer
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
    envs.cpu_instructions()  # both check the value, because the core does not take an unknown one
    envs.cpu_streams()
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
