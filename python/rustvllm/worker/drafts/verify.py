"""Drafts on the device: which of them equal the sampled tokens, and which drafts precede a row of logits.

Each row of logits is sampled as if its request had decoded up to there. A draft is kept if it equals the token sampled
in its place, so a request gets the same tokens as without drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rustvllm.layers.fused import runs_fused
from rustvllm.worker.drafts.rows import NO_TOKEN, DraftRows
from rustvllm.worker.step_buffers import StepBuffers


class DeviceDrafts:
    """The drafts of one step.

    Args:
        rows: The step's rows of logits.
        step: Where they are staged; they are on the device only after it has been sent.

    Attributes:
        rows: The same.
    """

    def __init__(self, rows: DraftRows, step: StepBuffers) -> None:
        self.rows = rows
        self._places = step.stage(rows.places)
        self._drafts = step.stage(rows.drafts)
        self._requests = step.stage(rows.requests)
        self._depths = step.stage(rows.depths)
        self._for_kernel: tuple[Tensor, Tensor] | None = None  # the ids and starts of ``rows``
        if runs_fused(self._drafts):
            self._for_kernel = step.stage(rows.ids), step.stage(rows.starts)

    def accept(self, sampled: Tensor) -> tuple[Tensor, Tensor]:
        """See ``DraftRows.accept``: takes int32 ``[n]``, returns int32 ``[num_sampled, 1 + d]``.

        Also returns the last id of each sample, int32 ``[num_sampled]``, or 0 if a sample has none.
        """
        if self._for_kernel is not None:
            from rustvllm.kernels.verify import verify

            drafted, starts = self._for_kernel
            ids = sampled.new_empty((self._drafts.shape[0], 1 + self._drafts.shape[1]))
            last = sampled.new_empty(ids.shape[0])
            verify(sampled, drafted, starts, ids.shape[1], ids, last)
            return ids, last
        ids = self._accept(sampled)
        return ids, last_tokens(ids)

    def _accept(self, sampled: Tensor) -> Tensor:
        num_samples, num_columns = self._drafts.shape
        ids = sampled.new_full((num_samples * (1 + num_columns),), NO_TOKEN)
        ids = ids.index_copy(0, self._places, sampled).view(num_samples, 1 + num_columns)
        num_right = (ids[:, :-1] == self._drafts).cumprod(dim=1).sum(dim=1)
        columns = torch.arange(1 + num_columns, device=ids.device)
        return torch.where(columns <= num_right[:, None], ids, NO_TOKEN)

    def push(self, endings: Tensor, rows: Tensor) -> Tensor:
        """Append to endings of outputs the drafts that precede a row of logits, and keep as many ids as before.

        Args:
            endings: int64 ``[w, length]``, the last ids of an output.
            rows: int64 ``[w]``, the row of logits for which each ending is wanted.
        """
        longer = torch.cat((endings, self._drafts[self._requests[rows]]), dim=1)
        columns = torch.arange(endings.shape[1], device=endings.device)
        return longer.gather(1, self._depths[rows][:, None] + columns)


def last_tokens(ids: Tensor) -> Tensor:
    """The last id of each row: takes int32 ``[r, c]``, returns int32 ``[r]``, 0 where a row has none."""
    last = (ids >= 0).sum(dim=1, keepdim=True).sub(1).clamp(min=0)
    return ids.gather(1, last)[:, 0].clamp(min=0)


def add_counts(counts: Tensor, rows: Tensor, ids: Tensor) -> None:
    """Count ids in place in int32 ``[p, vocab_size]``: rows and ids are int64 ``[k]``, and pairs may repeat."""
    counts.index_put_((rows, ids), torch.ones_like(ids, dtype=counts.dtype), accumulate=True)
