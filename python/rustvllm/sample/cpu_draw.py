"""Drawing on the CPU by the core: temperature, min_p, top_k, top_p and the draw, in a few passes and without a sort."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rustvllm import _core
from rustvllm.sample.metadata import SamplingMetadata
from rustvllm.sample.random import counter_uniform


class CpuDraw:
    """Draws with some threads.

    Args:
        threads: who shares the rows.
    """

    def __init__(self, threads: _core.CpuThreads) -> None:
        self._threads = threads

    def draw(self, logits: Tensor, rows: Tensor, temperature: Tensor, metadata: SamplingMetadata) -> Tensor:
        """An id for each of some rows.

        Args:
            logits: float32 ``[n, vocab_size]``, contiguous; the rows that are drawn from are overwritten.
            rows: int64 ``[m]``, each once.
            temperature: float32 ``[m]``, above 0.
            metadata: seeds, positions and filters of the ``m`` rows.

        Returns:
            int64 ``[m]``; −1 where a row has no finite distribution.
        """
        assert metadata.seeds is not None
        assert metadata.positions is not None
        num_rows = rows.shape[0]
        min_p, top_k, top_p = metadata.min_p, metadata.top_k, metadata.top_p
        ids = _core.draw_token_ids(
            self._threads,
            logits.numpy(),
            rows.numpy(),
            temperature.numpy(),
            np.zeros(num_rows, np.float32) if min_p is None else min_p.numpy(),
            np.zeros(num_rows, np.int64) if top_k is None else top_k.numpy(),
            np.ones(num_rows, np.float32) if top_p is None else top_p.numpy(),
            counter_uniform(metadata.seeds, metadata.positions).numpy(),
        )
        return torch.tensor(ids, dtype=torch.int64)
