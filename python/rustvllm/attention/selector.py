"""Which attention backend an engine uses."""

from __future__ import annotations

import torch

from rustvllm.attention.backend import AttentionBackend
from rustvllm.attention.cpu_backend import CPU_DTYPES, CPUAttentionBackend
from rustvllm.attention.metadata import KVCacheSpec
from rustvllm.attention.torch_backend import MAX_GATHER_BYTES, MAX_GATHER_BYTES_CPU, TorchAttentionBackend


def make_attention_backend(
    name: str, spec: KVCacheSpec, dtype: torch.dtype, device: torch.device, num_threads: int
) -> AttentionBackend:
    """The backend of a name; ``auto``: the core's on the CPU in a dtype that it has, else torch's.

    Args:
        name: ``auto``, ``torch`` or ``cpu``; that it suits device and dtype was checked with the configuration.
        spec: shape of the cache.
        dtype: of the cache.
        device: where it lies.
        num_threads: that torch computes with.
    """
    if name == "auto":
        name = "cpu" if device.type == "cpu" and dtype in CPU_DTYPES else "torch"
    if name == "cpu":
        return CPUAttentionBackend(num_threads)
    max_gather_bytes = MAX_GATHER_BYTES_CPU if device.type == "cpu" else MAX_GATHER_BYTES
    return TorchAttentionBackend(spec, dtype, max_gather_bytes=max_gather_bytes)
