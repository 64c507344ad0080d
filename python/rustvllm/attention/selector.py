"""Chooses the attention backend of an engine."""

from __future__ import annotations

import importlib.util

import torch

from rustvllm import _core
from rustvllm.attention.backend import AttentionBackend
from rustvllm.attention.cpu_backend import CPU_DTYPES, CPUAttentionBackend
from rustvllm.attention.metadata import KVCacheSpec
from rustvllm.attention.torch_backend import MAX_GATHER_BYTES, MAX_GATHER_BYTES_CPU, TorchAttentionBackend
from rustvllm.config.attention_backends import backends_of
from rustvllm.exceptions import ModelLoadError
from rustvllm.logger import init_logger

logger = init_logger(__name__)


def make_attention_backend(
    name: str,
    spec: KVCacheSpec,
    dtype: torch.dtype,
    device: torch.device,
    threads: _core.CpuThreads | int,
    *,
    batch_invariant: bool = False,
    cache_dtype: torch.dtype | None = None,
) -> AttentionBackend:
    """Make the attention backend with a given name.

    ``auto`` is the core's on the CPU in a dtype that it supports, Triton's on a GPU if its kernels support the model,
    and torch's elsewhere; if it is not Triton's on a GPU, the log says why.

    Args:
        name: ``auto``, or a row of ``config/attention_backends``, which has been checked against device and dtype with
            the configuration.
        spec: The shape of the cache.
        dtype: The dtype of the queries.
        device: The device that computes.
        threads: The core's threads, or how many the core's attention starts for itself.
        batch_invariant: Whether a token's result must not depend on the rest of the batch.
        cache_dtype: The dtype of the cache; None: that of the queries. uint8 is e4m3, which only Triton's kernels read.
            Only the core's kernels read bfloat16 with float32 queries, and int8 (a scale for each token and head).

    Raises:
        ModelLoadError: Triton is configured or needed, but is not installed or does not support the model; or no
            backend reads this cache dtype for these queries.
    """
    is_fp8 = cache_dtype == torch.uint8
    if cache_dtype not in (None, dtype, torch.uint8):
        if device.type != "cpu" or name not in ("auto", "cpu") or dtype not in CPU_DTYPES:
            raise ModelLoadError(
                f"kv_cache_dtype is {_name(cache_dtype)}, but on {device.type} a model in {_name(dtype)} needs a KV "
                f"cache in {_name(dtype)}: set kv_cache_dtype to auto"
            )
        name = "cpu"
    on_gpu = device.type == "cuda"
    if name == "triton" or is_fp8 or (on_gpu and (name == "auto" or batch_invariant)):
        reason = _why_not_triton(spec, dtype, device)
        if reason is None:
            # Importing it imports Triton.
            from rustvllm.attention.triton_backend import TritonAttentionBackend

            return TritonAttentionBackend(spec, dtype, device, batch_invariant=batch_invariant)
        if is_fp8:
            raise ModelLoadError(f"kv_cache_dtype is fp8, which only Triton's kernels support, but {reason}")
        if batch_invariant:
            raise ModelLoadError(f"batch_invariant is set, which on a GPU needs Triton's kernels, but {reason}")
        if name == "triton":
            raise ModelLoadError(f"attention_backend is triton, but {reason}; set attention_backend to torch or auto")
        logger.warning("attention runs in torch, not in Triton: %s", reason)
    if name == "auto":
        able = backends_of(device.type, _name(dtype))
        name = next((row.name for row in able if row.name != "triton"), "torch")
    if name == "cpu":
        return CPUAttentionBackend(threads)
    max_gather_bytes = MAX_GATHER_BYTES_CPU if device.type == "cpu" else MAX_GATHER_BYTES
    return TorchAttentionBackend(spec, dtype, max_gather_bytes=max_gather_bytes)


def _name(dtype: torch.dtype | None) -> str:
    return "int8_per_token_head" if dtype == torch.int8 else str(dtype).removeprefix("torch.")


def _why_not_triton(spec: KVCacheSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (pip install triton)"
    from rustvllm.attention.triton_backend import why_not

    return why_not(spec, dtype, device)
