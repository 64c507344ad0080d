"""Steps whose inputs stay where they are, for CUDA graphs, and the interface of backends that can plan them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from rustvllm.attention.backend import AttentionPlan


@dataclass(frozen=True, slots=True)
class StaticDecodeBatch:
    """``num_reqs`` requests with one new token each, in memory that is filled anew before every replay.

    All tensors are on the device and never move; nothing of them may be read on the host. Requests beyond those of a
    step are padding: their slot is −1, their length 1 and their row names the null block alone, so that they
    read one slot of zeros. What they compute is never read.

    Attributes:
        block_size: Tokens per block.
        block_table: int32 ``[num_rows, max_blocks]``; entries beyond a sequence are stale.
        table_rows: int32 ``[num_reqs]``, the row of each request.
        slot_mapping: int32 ``[num_reqs]``, of each request's new token.
        seq_lens: int32 ``[num_reqs]``, new token included.
        max_seq_len: What no entry of ``seq_lens`` exceeds, in any replay.
    """

    block_size: int
    block_table: Tensor
    table_rows: Tensor
    slot_mapping: Tensor
    seq_lens: Tensor
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class StaticMixedBatch:
    """Pieces of prompts and decodes, in memory that is filled anew before every replay.

    All tensors are on the device and never move; nothing of them may be read on the host. There is room for
    ``num_reqs - 1`` requests; those beyond a step's, the last always, are padding: they begin where the step's tokens
    end, and have no token and length 0. Tokens beyond a step's have slot −1; what is computed for them is never read.

    Attributes:
        block_size: Tokens per block.
        block_table: int32 ``[num_rows, max_blocks]``; entries beyond a sequence are stale.
        table_rows: int32 ``[num_reqs]``, the row of each request.
        slot_mapping: int32 ``[num_tokens]``, of each new token.
        query_start_loc: int32 ``[num_reqs + 1]``, where each request's new tokens begin.
        seq_lens: int32 ``[num_reqs]``, new tokens included.
        max_seq_len: What no entry of ``seq_lens`` exceeds, in any replay.
    """

    block_size: int
    block_table: Tensor
    table_rows: Tensor
    slot_mapping: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class StaticDraftBatch:
    """Decodes with drafts, in memory that is filled anew before every replay.

    All tensors are on the device and never move; nothing of them may be read on the host. Requests beyond a step's are
    padding: they begin where the step's tokens end, and have no token and length 0. Tokens beyond a step's have slot
    −1; what is computed for them is never read.

    Attributes:
        block_size: Tokens per block.
        block_table: int32 ``[num_rows, max_blocks]``; entries beyond a sequence are stale.
        table_rows: int32 ``[num_reqs]``, the row of each request.
        slot_mapping: int32 ``[num_reqs * width]``, of each new token.
        query_start_loc: int32 ``[num_reqs + 1]``, where each request's new tokens begin.
        seq_lens: int32 ``[num_reqs]``, new tokens included.
        max_seq_len: What no entry of ``seq_lens`` exceeds, in any replay.
        width: New tokens of a request at most.
    """

    block_size: int
    block_table: Tensor
    table_rows: Tensor
    slot_mapping: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    max_seq_len: int
    width: int


class StaticMixedPlan(AttentionPlan, Protocol):
    """The attention of a captured mixed step."""

    def begin_step(self) -> None:
        """Work out from the lengths which program computes what: the first of what a graph does."""
        ...


@runtime_checkable
class StaticAttentionBackend(Protocol):
    """An attention backend whose steps can be captured."""

    def plan_static(self, batch: StaticDecodeBatch) -> AttentionPlan:
        """Prepare the batch of a graph of decodes, once, before it is captured.

        ``forward`` of the plan is what is captured: it launches the same kernels over the same memory whatever the
        batch holds, copies nothing from or to the host and waits for nothing.
        """
        ...

    def plan_static_mixed(self, batch: StaticMixedBatch) -> StaticMixedPlan:
        """As ``plan_static``, of a step with pieces of prompts."""
        ...

    def plan_static_drafts(self, batch: StaticDraftBatch) -> AttentionPlan:
        """As ``plan_static``, of a step with drafts."""
        ...
