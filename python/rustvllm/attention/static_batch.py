"""Steps whose inputs have fixed addresses, for CUDA graphs, and the interface of backends that can plan them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from rustvllm.attention.backend import AttentionPlan


@dataclass(frozen=True, slots=True)
class StaticDecodeBatch:
    """``num_reqs`` requests with one new token each, in memory that is refilled before every replay.

    All tensors stay at their place on the device and must not be read on the host. Requests beyond those of a step are
    padding: their slot is −1, their length is 1, and their row names only the null block, so they read one slot of
    zeros. Their results are never read.

    Attributes:
        block_size: Tokens per block.
        block_table: int32 ``[num_rows, max_blocks]``; entries beyond the end of a sequence are stale.
        table_rows: int32 ``[num_reqs]``, the row of each request.
        slot_mapping: int32 ``[num_reqs]``, the slot of each request's new token.
        seq_lens: int32 ``[num_reqs]``, including the new token.
        max_seq_len: The upper limit of ``seq_lens`` in all replays.
    """

    block_size: int
    block_table: Tensor
    table_rows: Tensor
    slot_mapping: Tensor
    seq_lens: Tensor
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class StaticMixedBatch:
    """Pieces of prompts and decodes, in memory that is refilled before every replay.

    All tensors stay at their place on the device and must not be read on the host. There is room for ``num_reqs - 1``
    requests. Requests beyond those of a step, always including the last, are padding: they begin where the step's
    tokens end, and have no token and length 0. Tokens beyond those of a step have slot −1; their results are never
    read.

    Attributes:
        block_size: Tokens per block.
        block_table: int32 ``[num_rows, max_blocks]``; entries beyond the end of a sequence are stale.
        table_rows: int32 ``[num_reqs]``, the row of each request.
        slot_mapping: int32 ``[num_tokens]``, the slot of each new token.
        query_start_loc: int32 ``[num_reqs + 1]``, where each request's new tokens begin.
        seq_lens: int32 ``[num_reqs]``, including new tokens.
        max_seq_len: The upper limit of ``seq_lens`` in all replays.
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
    """Decodes with drafts, in memory that is refilled before every replay.

    All tensors stay at their place on the device and must not be read on the host. Requests beyond those of a step are
    padding: they begin where the step's tokens end, and have no token and length 0. Tokens beyond those of a step have
    slot −1; their results are never read.

    Attributes:
        block_size: Tokens per block.
        block_table: int32 ``[num_rows, max_blocks]``; entries beyond the end of a sequence are stale.
        table_rows: int32 ``[num_reqs]``, the row of each request.
        slot_mapping: int32 ``[num_reqs * width]``, the slot of each new token.
        query_start_loc: int32 ``[num_reqs + 1]``, where each request's new tokens begin.
        seq_lens: int32 ``[num_reqs]``, including new tokens.
        max_seq_len: The upper limit of ``seq_lens`` in all replays.
        width: The most new tokens of a request.
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
    """The attention plan of a captured mixed step."""

    def begin_step(self) -> None:
        """Compute from the lengths which program computes what; a graph does this first."""
        ...


@runtime_checkable
class StaticAttentionBackend(Protocol):
    """An attention backend whose steps can be captured."""

    def plan_static(self, batch: StaticDecodeBatch) -> AttentionPlan:
        """Prepare the batch of a graph of decodes, once, before the capture.

        The capture runs the plan's ``forward``: it launches the same kernels over the same memory for any content of
        the batch, copies nothing from or to the host, and waits for nothing.
        """
        ...

    def plan_static_mixed(self, batch: StaticMixedBatch) -> StaticMixedPlan:
        """See ``plan_static``; for a step with pieces of prompts."""
        ...

    def plan_static_drafts(self, batch: StaticDraftBatch) -> AttentionPlan:
        """See ``plan_static``; for a step with drafts."""
        ...
