"""Log-probabilities of sampled tokens, of the rows that ask: of the raw logits, before anything changes them, or of
what is drawn from.

``scorer`` computes them; here is what goes in and comes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LogprobsMetadata:
    """Which rows ask, and for how many candidates.

    Attributes:
        rows: int64 ``[m]``, indices into the sampled rows, ascending, on the device.
        host_rows: int32 ``[m]``, the same on the host.
        num_logprobs: int32 ``[m]``, how many of the likeliest tokens each gets in addition to its own; on the host.
    """

    rows: Tensor
    host_rows: npt.NDArray[np.int32]
    num_logprobs: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LogprobsArrays:
    """What the sampler says of the rows that asked, in host memory, as ``Scheduler.update_from_output`` takes it.

    Attributes:
        places: int32 ``[m]``, places among the step's sampled ids, ascending.
        token_ids: int32 ``[m, 1 + k]``: the sampled id, then the likeliest ones; −1 where a row asked for fewer.
        logprobs: float32 ``[m, 1 + k]``, natural logarithms.
        ranks: int32 ``[m]``, rank of the sampled token, from 1.
    """

    places: npt.NDArray[np.int32]
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int32]

    def as_tuple(
        self,
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        """In the order of the boundary."""
        return self.places, self.token_ids, self.logprobs, self.ranks


class ProcessedLogits:
    """What the sampler draws from, of the rows that ask: after rules, penalties and processors, and in rows that are
    not greedy after temperature and truncation too.

    Attributes:
        values: float32 ``[m, vocab_size]``; there once the sampler has drawn.
    """

    def __init__(self, metadata: LogprobsMetadata) -> None:
        self._rows = metadata.rows
        self.values: Tensor | None = None

    def keep(self, logits: Tensor) -> None:
        """Copy the asking rows, as greedy ones are chosen from."""
        self.values = logits.index_select(0, self._rows)

    def keep_random(self, rows: Tensor, logits: Tensor) -> None:
        """Replace those that are drawn at random: int64 ``[k]`` rows, ascending, and their logits."""
        assert self.values is not None
        places = torch.searchsorted(rows, self._rows).clamp_(max=rows.shape[0] - 1)
        is_random = (rows[places] == self._rows)[:, None]  # no mask picks rows: a device would be waited for
        self.values = torch.where(is_random, logits[places], self.values)


@dataclass(frozen=True, slots=True)
class GatheredLogprobs:
    """What is to be said of the tokens that were sampled, where it was computed.

    Attributes:
        metadata: Which rows ask.
        tensors: Token ids int32 ``[m, 1 + k]``, log-probabilities float32 ``[m, 1 + k]``, ranks int32 ``[m]``.
    """

    metadata: LogprobsMetadata
    tensors: tuple[Tensor, ...]

    def arrays(self, tensors: Sequence[Tensor]) -> LogprobsArrays:
        """The same in host memory, of copies of ``tensors`` there, which may be written."""
        all_ids, all_values, ranks = (tensor.numpy() for tensor in tensors)
        num_logprobs = self.metadata.num_logprobs
        unwanted = np.arange(all_ids.shape[1] - 1)[None, :] >= num_logprobs[:, None]
        all_ids[:, 1:][unwanted] = -1
        return LogprobsArrays(self.metadata.host_rows, all_ids, all_values, ranks)
