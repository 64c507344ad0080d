"""``GraphContext``: what all CUDA graphs of an engine compute over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rustvllm.attention.static_batch import StaticAttentionBackend
from rustvllm.layers.fused import runs_fused
from rustvllm.worker.graphs.recorder import GraphRecorder
from rustvllm.worker.graphs.sampling import GraphSampling

if TYPE_CHECKING:
    from rustvllm.lora.static_adapters import StaticAdapters
    from rustvllm.models.interface import CausalLM


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphContext:
    """One model over one KV cache.

    Attributes:
        recorder: captures.
        model: filled.
        backend: Computes attention, over a static batch.
        kv_caches: One per layer.
        block_table: int32 ``[max_num_seqs + 1, max_blocks]`` of the persistent rows; the last names the null block.
        last_token_ids: int32 ``[max_num_seqs + 1]``, what was sampled last in each row: it stands in for a −1 among the
            input ids. None when there are no such.
        block_size: Tokens per KV block.
        sampling: How graphs go on from the hidden states; None: these are what they leave.
        make_adapters: Makes what graphs of at most so many tokens read of a step's adapters; None: theirs have none.
    """

    recorder: GraphRecorder
    model: CausalLM
    backend: StaticAttentionBackend
    kv_caches: Sequence[Tensor]
    block_table: Tensor
    last_token_ids: Tensor | None
    block_size: int
    sampling: GraphSampling | None = None
    make_adapters: Callable[[int], StaticAdapters] | None = None

    def known_ids(self, input_ids: Tensor, rows: Tensor) -> Tensor:
        """A step's ids, int32 ``[n]``, with what was sampled last in its row, ``[n]``, in the place of a −1."""
        if self.last_token_ids is None:
            return input_ids
        if runs_fused(input_ids):
            from rustvllm.kernels.known_ids import known_ids

            return known_ids(input_ids, rows, self.last_token_ids)
        return torch.where(input_ids < 0, self.last_token_ids.index_select(0, rows), input_ids)

    def adapters_of(self, max_tokens: int) -> StaticAdapters | None:
        """What graphs of at most so many tokens read of a step's adapters, in memory of their own."""
        return None if self.make_adapters is None else self.make_adapters(max_tokens)

    @property
    def null_row(self) -> int:
        """The row of the block table that names the null block."""
        return self.block_table.shape[0] - 1

    @property
    def max_seq_len(self) -> int:
        """Tokens that a sequence's blocks have room for."""
        return self.block_table.shape[1] * self.block_size
