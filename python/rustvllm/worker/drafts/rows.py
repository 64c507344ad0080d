"""Which rows of logits a step with drafts has, as numpy arrays on the host; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from rustvllm._core import SchedulerOutput

NO_TOKEN = -1
"""Fills a row of sampled ids behind its last token."""
NO_DRAFT = -2
"""Fills the drafts of a request that has fewer than another; never equal to a sampled id."""


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The rows of logits of a step: each sampled request has one for its newest token and one for each of its drafts.

    Attributes:
        requests: int64 ``[n]``, the sample of the step that each row of logits belongs to, ascending.
        depths: int64 ``[n]``, how many drafts precede the token that the row is for.
        drafts: int64 ``[num_sampled, d]``, padded with ``NO_DRAFT``; ``d`` is at least 1.
    """

    requests: npt.NDArray[np.int64]
    depths: npt.NDArray[np.int64]
    drafts: npt.NDArray[np.int64]

    @property
    def first(self) -> npt.NDArray[np.int64]:
        """The first row of logits of each sample, which follows no drafts, int64 ``[num_sampled]``."""
        return np.flatnonzero(self.depths == 0)

    @property
    def starts(self) -> npt.NDArray[np.int32]:
        """The first row of logits of each sample, and one past the last row, int32 ``[num_sampled + 1]``."""
        return np.append(self.first, self.depths.size).astype(np.int32)

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """The draft directly before each row's token, int32 ``[n]``; ``NO_DRAFT`` where there is none."""
        return np.where(self.depths > 0, self.drafts[self.requests, self.depths - 1], NO_DRAFT).astype(np.int32)

    @property
    def places(self) -> npt.NDArray[np.int64]:
        """Where each row's token goes in the step's ids ``[num_sampled, 1 + d]``, as a flat index, int64 ``[n]``."""
        return np.asarray(self.requests * (1 + self.drafts.shape[1]) + self.depths)

    def earlier(self, which: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """All drafts before the tokens of some rows of logits, as pairs of row and id.

        Args:
            which: int64 ``[m]``, rows of logits, ascending; at least one.

        Returns:
            Indices into ``which``, int64 ``[k]``, and token ids, int64 ``[k]``.
        """
        places, columns = np.nonzero(np.arange(self.drafts.shape[1]) < self.depths[which][:, None])
        return places, self.drafts[self.requests[which[places]], columns]

    def accept(self, sampled: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The ids of each sample: its drafts, as long as they equal the sampled ids, and then one sampled id.

        Args:
            sampled: int32 ``[n]``, one for each row of logits.

        Returns:
            int32 ``[num_sampled, 1 + d]``, ended by ``NO_TOKEN``.
        """
        num_samples, num_columns = self.drafts.shape
        ids = np.full((num_samples, 1 + num_columns), NO_TOKEN, np.int32)
        ids[self.requests, self.depths] = sampled
        num_right = np.logical_and.accumulate(ids[:, :-1] == self.drafts, axis=1).sum(axis=1)
        ids[np.arange(1 + num_columns) > num_right[:, None]] = NO_TOKEN
        return ids


def draft_rows(output: SchedulerOutput, arrays: Mapping[str, npt.NDArray[Any]]) -> DraftRows | None:
    """The rows of logits of a step; None if the step has no drafts, so that each sample has one row."""
    if output.num_logits == output.num_sampled:
        return None
    num_drafts = arrays["num_draft_tokens"][: output.num_reqs]
    rows = arrays["idx_mapping"][: output.num_reqs]
    is_sampled = np.zeros(int(rows.max()) + 1, np.bool_)  # by persistent row; `np.isin` would sort both arrays
    is_sampled[arrays["sampled_rows"][: output.num_sampled]] = True
    num_logits = 1 + num_drafts[is_sampled[rows]].astype(np.int64)
    requests = np.repeat(np.arange(num_logits.size), num_logits)
    depths = np.arange(requests.size) - np.repeat(np.cumsum(num_logits) - num_logits, num_logits)
    drafts = np.full((num_logits.size, int(num_logits.max()) - 1), NO_DRAFT, np.int64)
    is_draft = depths > 0
    ids = arrays["input_ids"][arrays["logits_indices"][: output.num_logits]]
    drafts[requests[is_draft], depths[is_draft] - 1] = ids[is_draft]
    return DraftRows(requests, depths, drafts)
