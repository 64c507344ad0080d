"""Makes one vector of the hidden states of a prompt, which may come in several steps.

What batch mates, chunks and a preemption change in a vector is no more than what they change in hidden states. A mean
is therefore summed from numbers that are rounded to multiples of 2⁻³⁰ first: sums of such numbers are exact in float64
up to 2²³, so that their order cannot matter, wherever a prompt is cut and whatever adds them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from rustvllm.worker.step_output import POOLED

if TYPE_CHECKING:
    from rustvllm._core import SchedulerOutput
    from rustvllm.worker.step_buffers import StepBuffers

NOT_NUMBERS: Final = -1
"""Ends a request whose hidden states are not numbers with an error, as that of logits that are none."""
_STEPS_PER_ONE: Final = 2.0**30


class Pooler:
    """Keeps what it needs of prompts that are not computed to their end, by persistent row.

    Args:
        pooling_type: ``LAST``, ``MEAN`` or ``CLS``.
        num_rows: Persistent rows.
        score: Makes a number for each label of vectors, float32 ``[n, width]`` → float32 ``[n, num_labels]``; None: the
            vectors are what is asked for.
    """

    def __init__(self, pooling_type: str, num_rows: int, score: Callable[[Tensor], Tensor] | None = None) -> None:
        self._type = pooling_type
        self._score = score
        self._num_rows = num_rows
        self._kept: Tensor | None = None  # float64 [num_rows, width]: sums, or first states; made when it is needed

    def pool(self, hidden: Tensor, output: SchedulerOutput, step: StepBuffers) -> tuple[Tensor, Tensor]:
        """Take in a step; the host does not wait.

        Args:
            hidden: ``[num_tokens, width]``, normed hidden states of the step's tokens.
            output: The step.
            step: Its arrays.

        Returns:
            int32 ``[num_sampled, 1]``, ``POOLED`` or ``NOT_NUMBERS``, and float32 ``[num_sampled, width]``, the vectors
            of the requests whose prompts end in the step, or ``[num_sampled, num_labels]``.
        """
        if self._type == "LAST":
            places = step.on_device("logits_indices", output.num_logits)
            vectors = hidden[places].float()
        else:
            self._take_in(hidden, output, step)
            vectors = self._ended(output, step)
        if self._score is not None:
            vectors = self._score(vectors)
        is_good = vectors.isfinite().all(dim=1, keepdim=True)
        codes = torch.where(is_good, POOLED, NOT_NUMBERS).to(torch.int32)
        return codes, vectors

    def _take_in(self, hidden: Tensor, output: SchedulerOutput, step: StepBuffers) -> None:
        if self._kept is None:
            shape = self._num_rows, hidden.shape[1]
            self._kept = torch.zeros(shape, dtype=torch.float64, device=hidden.device)
        rows = step.int32("idx_mapping", output.num_reqs).tolist()
        starts = step.int32("query_start_loc", output.num_reqs + 1).tolist()
        computed = step.int32("num_computed_tokens", output.num_reqs).tolist()
        for index, row in enumerate(rows):
            piece = hidden[starts[index] : starts[index + 1]]
            if self._type == "CLS":
                if computed[index] == 0:
                    self._kept[row] = piece[0]
                continue
            total = (piece.double() * _STEPS_PER_ONE).round_().sum(dim=0)
            self._kept[row] = total if computed[index] == 0 else self._kept[row] + total

    def _ended(self, output: SchedulerOutput, step: StepBuffers) -> Tensor:
        """The vectors of the requests whose prompts end in the step, float32 ``[num_sampled, width]``."""
        assert self._kept is not None
        kept = self._kept[step.on_device("sampled_rows", output.num_sampled)]
        if self._type == "MEAN":
            # A prompt's length is the position of its last token, and one.
            places = step.on_device("logits_indices", output.num_logits)
            lengths = step.on_device("positions", output.total_num_scheduled_tokens)[places] + 1
            kept = kept / (lengths * _STEPS_PER_ONE)[:, None]
        return kept.float()
