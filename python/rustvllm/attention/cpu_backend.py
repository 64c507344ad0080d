"""Paged attention on the CPU by the Rust core, which reads the cache where it lies.

Decode and prefill are one call per layer. Nothing is gathered, and no bit of a token's result depends on other requests
in the step, nor on the pieces in which its prompt was computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rustvllm import _core
from rustvllm.attention.metadata import AttentionMetadata
from rustvllm.layers.host_array import host_array

CPU_DTYPES = (torch.float32, torch.bfloat16)
"""What the core's kernels compute in; their sums have 32 bits."""


class CPUAttentionBackend:
    """See the module.

    Args:
        threads: Which compute; or how many, the caller included. They sleep between layers.
    """

    name = "cpu"
    takes_table_rows = True

    def __init__(self, threads: _core.CpuThreads | int) -> None:
        self._attention = _core.CpuAttention(threads)

    def plan(self, metadata: AttentionMetadata) -> CPUAttentionPlan:
        """Check the step, once for all layers; see ``AttentionBackend.plan``.

        Raises:
            ValueError: A block, slot or length that cannot be.
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
            )
        )


class CPUAttentionPlan:
    """One step; see ``AttentionPlan``.

    Attributes:
        core: The core's plan of it.
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
    ) -> Tensor:
        """See ``AttentionPlan.forward``.

        Raises:
            TypeError: A tensor that is not of the query's dtype, float32 or bfloat16; a cache of bfloat16 suits both.
            ValueError: Shapes that do not fit each other, a block that the cache does not have, or an option that means
                nothing.
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
        )
        return out
