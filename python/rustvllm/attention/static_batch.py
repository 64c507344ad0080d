"""A decode step whose inputs stay where they are, for CUDA graphs, and the interface of backends that can plan it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from rustvllm.attention.backend import AttentionPlan


@dataclass(frozen=True, slots=True)
class StaticDecodeBatch:
    """``num_reqs`` requests with one new token each, in memory that is filled anew before every replay.

    All tensors are on the device and never move; nothing of them may be read on the host. Requests beyond those of a
    step are padding: their slot is −1, their length 1 and their block table names the null block alone, so that they
    read one slot of zeros. What they compute is never read.

    Attributes:
        block_size: Tokens per block.
        block_table: int32 ``[num_reqs, max_blocks]``; entries beyond a sequence are stale.
        slot_mapping: int32 ``[num_reqs]``, of each request's new token.
        seq_lens: int32 ``[num_reqs]``, new token included.
        max_seq_len: What no entry of ``seq_lens`` exceeds, in any replay.
    """

    block_size: int
    block_table: Tensor
    slot_mapping: Tensor
    seq_lens: Tensor
    max_seq_len: int


@runtime_checkable
class StaticAttentionBackend(Protocol):
    """An attention backend whose decode can be captured."""

    def plan_static(self, batch: StaticDecodeBatch) -> AttentionPlan:
        """Prepare a graph's batch, once, before it is captured.

        ``forward`` of the plan is what is captured: it launches the same kernels over the same memory whatever the
        batch holds, copies nothing from or to the host and waits for nothing.
        """
        ...
