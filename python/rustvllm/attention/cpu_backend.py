"""Paged attention on the CPU by the Rust core, which reads the cache where it lies.

Decode and prefill are one call per layer. Nothing is gathered, and no bit of a token's result depends on who else is in
the step, nor on the pieces in which its prompt was computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rustvllm import _core
from rustvllm.attention.metadata import AttentionMetadata

CPU_DTYPES = (torch.float32, torch.bfloat16)
"""What the core's kernels compute in; their sums have 32 bits."""


class CPUAttentionBackend:
    """See the module.

    Args:
        threads: which compute; or how many, the caller included. They sleep between layers.
    """

    name = "cpu"

    def __init__(self, threads: _core.CpuThreads | int) -> None:
        self._attention = _core.CpuAttention(threads)

    def plan(self, metadata: AttentionMetadata) -> CPUAttentionPlan:
        """Check the step, once for all layers; see ``AttentionBackend.plan``.

        Raises:
            ValueError: a block, slot or length that cannot be.
        """
        return CPUAttentionPlan(
            self._attention.plan(
                metadata.block_size,
                metadata.query_start_loc,
                metadata.seq_lens,
                metadata.block_table.numpy(),
                metadata.slot_mapping.numpy(),
            )
        )


class CPUAttentionPlan:
    """One step; see ``AttentionPlan``.

    Attributes:
        core: the core's plan of it.
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
            TypeError: a tensor that is not of the query's dtype, float32 or bfloat16.
            ValueError: shapes that do not fit each other, a block that the cache does not have, or an option that means
                nothing.
        """
        out = torch.empty(query.shape, dtype=query.dtype)
        self.core.forward(
            _array(query),
            _array(key),
            _array(value),
            _array(kv_cache),
            _array(out),
            scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            alibi_slopes=alibi_slopes,
        )
        return out


def _array(tensor: Tensor) -> npt.NDArray[np.generic]:
    """The tensor's own memory as numpy sees it, which knows no bfloat16."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: npt.NDArray[np.generic] = tensor.numpy()
    return array
