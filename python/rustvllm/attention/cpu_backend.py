"""Paged attention on the CPU by the Rust core, which reads the cache in place.

Decode and prefill are one call per layer. Nothing is gathered, and a token's result does not depend, bit for bit, on
other requests in the step, nor on the pieces in which its prompt is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rustvllm import _core
from rustvllm.attention.metadata import AttentionMetadata
from rustvllm.layers.host_array import host_array

CPU_DTYPES = (torch.float32, torch.bfloat16)
"""The dtypes of the core's kernels; they sum in 32 bits."""


class CPUAttentionBackend:
    """See the module.

    Args:
        threads: The threads that compute, or how many, including the caller. They sleep between layers.
    """

    name = "cpu"
    takes_table_rows = True

    def __init__(self, threads: _core.CpuThreads | int) -> None:
        self._attention = _core.CpuAttention(threads)

    def plan(self, metadata: AttentionMetadata) -> CPUAttentionPlan:
        """Check the step, once for all layers; see ``AttentionBackend.plan``.

        Raises:
            ValueError: A block, slot, length or number of visible tokens is invalid.
        """
        rows = metadata.table_rows
        return CPUAttentionPlan(
            self._attention.plan(
                metadata.block_size,
                metadata.query_start_loc,
                metadata.seq_lens,
                metadata.block_table.numpy(),
                metadata.slot_mapping.numpy(),
                None if rows is None else rows.numpy(),
                metadata.visible,
            )
        )


class CPUAttentionPlan:
    """One step; see ``AttentionPlan``.

    Attributes:
        core: The core's plan of the step.
    """

    def __init__(self, plan: _core.CpuAttentionPlan) -> None:
        self.core = plan

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        scale: float,
        *,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        alibi_slopes: Sequence[float] | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See ``AttentionPlan.forward``.

        Raises:
            TypeError: A tensor does not have the query's dtype, which is float32 or bfloat16; the KV cache may also be
                bfloat16 for a float32 query, or int8 with scales.
            ValueError: Shapes do not match, the cache lacks a block, or an option is invalid.
        """
        out = torch.empty(query.shape, dtype=query.dtype)
        self.core.forward(
            host_array(query),
            host_array(key),
            host_array(value),
            host_array(kv_cache),
            host_array(out),
            scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            alibi_slopes=alibi_slopes,
            sinks=None if sinks is None else sinks.tolist(),
        )
        return out
