"""Describes the ragged batch of one step to attention backends, on the device and on the host."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rustvllm.config.cache import INT8_SCALE_BYTES


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The shape of the KV cache of a model.

    Attributes:
        num_layers: Layers that have their own cache.
        num_kv_heads: Heads of keys, and of values.
        head_dim: Features per head.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def layer_shape(
        self, num_blocks: int, block_size: int, dtype: torch.dtype | None = None
    ) -> tuple[int, int, int, int, int]:
        """``[2 (keys, values), num_blocks, block_size, num_kv_heads, head_dim]``.

        Args:
            num_blocks: Number of blocks.
            block_size: Tokens per block.
            dtype: The cache's dtype. In int8 a head has its features and then the four bytes of a float32 scale, so the
                last dimension is ``head_dim + 4``.
        """
        head_len = self.head_dim + (INT8_SCALE_BYTES if dtype == torch.int8 else 0)
        return (2, num_blocks, block_size, self.num_kv_heads, head_len)

    def bytes_per_block(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block in ``dtype`` over all layers."""
        return self.num_layers * math.prod(self.layer_shape(1, block_size, dtype)) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step: ``num_reqs`` requests, whose new tokens lie one after another in the flattened batch.

    Request ``i`` has the tokens ``query_start_loc[i] : query_start_loc[i + 1]``. They are the last of its
    ``seq_lens[i]`` tokens, all of which are in the KV cache once this step's keys and values are written.

    Attributes:
        block_size: Tokens per block.
        block_table: int32 ``[num_reqs, max_blocks]`` on the device; entries beyond the end of a sequence are stale.
            With ``table_rows`` it may have other rows.
        slot_mapping: int32 ``[num_tokens]`` on the device: ``block_id · block_size + offset`` of each new token, −1 for
            a token that is not kept.
        query_start_loc: int32 ``[num_reqs + 1]`` on the host.
        seq_lens: int32 ``[num_reqs]`` on the host, including new tokens.
        has_padding: Whether ``slot_mapping`` contains −1.
        table_rows: int32 ``[num_reqs]`` on the device, each request's row of ``block_table``, for backends that read
            it; None if the rows are those of the requests, in order.
        stage: Sends an array that a plan computes on the host to the device, together with the rest of the step; None
            if the step has been sent already.
        visible: int32 ``[num_tokens]`` on the host: how many tokens of its sequence each token sees, its own position
            + 1 or more; in a request it does not decrease. None: each token sees those up to itself.
        on_device: ``query_start_loc`` and ``seq_lens`` on the device; None if they are only on the host.
    """

    block_size: int
    block_table: Tensor
    slot_mapping: Tensor
    query_start_loc: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    has_padding: bool = False
    table_rows: Tensor | None = None
    on_device: tuple[Tensor, Tensor] | None = None
    stage: Callable[[npt.NDArray[np.int32]], Tensor] | None = None
    visible: npt.NDArray[np.int32] | None = None


def visible_counts(
    query_start_loc: npt.NDArray[np.int32],
    seq_lens: npt.NDArray[np.int32],
    places: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int32],
) -> npt.NDArray[np.int32]:
    """How many tokens of its sequence each token of a step sees: those up to itself, with exceptions.

    Args:
        query_start_loc: int32 ``[num_reqs + 1]``, as in :class:`AttentionMetadata`.
        seq_lens: int32 ``[num_reqs]``, likewise.
        places: int64 ``[n]``, the indices of the tokens that see more.
        counts: int32 ``[n]``, how many each of these sees.

    Returns:
        int32 ``[num_tokens]``.
    """
    visible = np.arange(1, query_start_loc[-1] + 1, dtype=np.int32)
    visible += np.repeat(seq_lens - query_start_loc[1:], np.diff(query_start_loc))
    visible[places] = counts
    return visible
