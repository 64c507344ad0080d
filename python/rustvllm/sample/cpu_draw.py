"""The core's sampling on the CPU: masks, penalties, temperature, filters, the draw and log-probabilities.

They take few passes over the logits, without a sort.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rustvllm import _core
from rustvllm.sample.metadata import Penalties, SamplingMetadata
from rustvllm.sample.random import counter_uniform


class CpuDraw:
    """Masks, penalizes, draws and scores with several threads.

    Args:
        threads: The threads that share the rows.
    """

    def __init__(self, threads: _core.CpuThreads) -> None:
        self._threads = threads

    def mask(self, logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
        """See ``apply_bitmask``; logits must be float32 and contiguous, and no row may occur twice."""
        _core.mask_logits(self._threads, logits.numpy(), rows.numpy(), bitmask.numpy())

    def penalize(self, logits: Tensor, penalties: Penalties) -> None:
        """See ``apply_penalties``; logits must be float32 and contiguous, and no row may occur twice."""
        _core.penalize_logits(
            self._threads,
            logits.numpy(),
            penalties.rows.numpy(),
            penalties.slots.numpy(),
            penalties.presence.numpy(),
            penalties.frequency.numpy(),
            penalties.repetition.numpy(),
            penalties.output_counts.numpy(),
            penalties.prompt_mask.numpy().view(np.uint8),
        )

    def draw(self, logits: Tensor, rows: Tensor, temperature: Tensor, metadata: SamplingMetadata) -> Tensor:
        """Draw an id for each of some rows.

        Args:
            logits: float32 ``[n, vocab_size]``, contiguous.
            rows: int64 ``[m]``, each once.
            temperature: float32 ``[m]``, above 0.
            metadata: Seeds, positions and filters of the ``m`` rows.

        Returns:
            int64 ``[m]``; −1 where a row has no finite distribution.
        """
        assert metadata.seeds is not None
        assert metadata.positions is not None
        numbers = {"temperature": temperature, **metadata.filters}
        ids = _core.draw_token_ids(
            self._threads,
            logits.numpy(),
            rows.numpy(),
            counter_uniform(metadata.seeds, metadata.positions).numpy(),
            {name: values.numpy() for name, values in numbers.items()},
        )
        return torch.tensor(ids, dtype=torch.int64)

    def score(
        self, logits: Tensor, rows: Tensor, token_ids: Tensor, count: int, *, is_normalized: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Score one token of each of some rows, and find the likeliest ones; see ``scorer.TokenScores``.

        The last tensor, float64 ``[m]``, is what to subtract from any other logit of a row for its log-probability.

        Args:
            logits: float32 ``[n, vocab_size]``, contiguous.
            rows: int64 ``[m]``, each once.
            token_ids: int64 ``[m]``.
            count: How many of the likeliest, at most ``vocab_size``.
            is_normalized: Give log-probabilities, not logits.
        """
        ids = torch.empty((len(rows), 1 + count), dtype=torch.int32)
        values = torch.empty(ids.shape, dtype=torch.float32)
        ranks = torch.empty(len(rows), dtype=torch.int32)
        log_totals = torch.empty(len(rows), dtype=torch.float64)
        arrays = (logits.numpy(), rows.numpy(), token_ids.numpy())
        found = (tensor.numpy() for tensor in (ids, values, ranks, log_totals))
        _core.score_token_ids(self._threads, *arrays, is_normalized, *found)
        return ids, values, ranks, log_totals
