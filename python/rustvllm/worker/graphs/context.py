"""``GraphContext``: what all CUDA graphs of an engine share."""

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
        recorder: Captures graphs.
        model: Loaded.
        backend: Computes attention over a static batch.
        kv_caches: One per layer.
        block_table: int32 ``[max_num_seqs + 1, max_blocks]`` by persistent row; the last row names the null block.
        last_token_ids: int32 ``[max_num_seqs + 1]``, the id sampled last in each row, which replaces a −1 among the
            input ids. None if no step has a −1.
        block_size: Tokens per KV block.
        sampling: Computes logits and tokens in the graph; None if graphs end with the hidden states.
        make_adapters: Makes the adapters' static inputs of graphs with up to a number of tokens; None if graphs have
            no adapters.
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
        """A step's ids, int32 ``[n]``, with each −1 replaced by the id sampled last in the token's row (``[n]``)."""
        if self.last_token_ids is None:
            return input_ids
        if runs_fused(input_ids):
            from rustvllm.kernels.known_ids import known_ids

            return known_ids(input_ids, rows, self.last_token_ids)
        return torch.where(input_ids < 0, self.last_token_ids.index_select(0, rows), input_ids)

    def adapters_of(self, max_tokens: int) -> StaticAdapters | None:
        """The adapters' static inputs for graphs of at most ``max_tokens`` tokens, in their own memory."""
        return None if self.make_adapters is None else self.make_adapters(max_tokens)

    @property
    def null_row(self) -> int:
        """The row of the block table that names the null block."""
        return self.block_table.shape[0] - 1

    @property
    def max_seq_len(self) -> int:
        """The most tokens that the blocks of a sequence can hold."""
        return self.block_table.shape[1] * self.block_size
