"""Log-probabilities of sampled tokens, for requests that ask: from the raw logits, or from the final ones that the
sampler draws from.

``scorer`` computes them; this module has its inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rustvllm.sample.listed_tokens import ListedTokens


@dataclass(frozen=True, slots=True)
class LogprobsMetadata:
    """Which rows need log-probabilities, and of how many candidates.

    Attributes:
        rows: int64 ``[m]``, indices into the sampled rows, ascending, on the device.
        host_rows: int32 ``[m]``, the same on the host.
        num_logprobs: int32 ``[m]``, how many of the likeliest tokens each row gets in addition to its own; on the host.
        listed: Tokens that rows get instead of the likeliest; None if no row names any.
    """

    rows: Tensor
    host_rows: npt.NDArray[np.int32]
    num_logprobs: npt.NDArray[np.int32]
    listed: ListedTokens | None = None


@dataclass(frozen=True, slots=True)
class LogprobsArrays:
    """Log-probabilities in host memory, in the form that ``Scheduler.update_from_output`` takes.

    Attributes:
        places: int32 ``[m]``, flat indices into the step's sampled ids, ascending.
        token_ids: int32 ``[m, 1 + k]``: the sampled id, then the likeliest ones, or those that the row named; −1 where
            a row asked for fewer.
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
        """The arrays in the order in which the core takes them."""
        return self.places, self.token_ids, self.logprobs, self.ranks


class ProcessedLogits:
    """The logits that the sampler draws from, for rows that need log-probabilities: after rules, penalties and
    processors, and for rows that are not greedy also after temperature and truncation.

    Attributes:
        values: float32 ``[m, vocab_size]``; set once the sampler has drawn.
    """

    def __init__(self, metadata: LogprobsMetadata) -> None:
        self._rows = metadata.rows
        self.values: Tensor | None = None

    def keep(self, logits: Tensor) -> None:
        """Copy the wanted rows in the form from which greedy rows are chosen."""
        self.values = logits.index_select(0, self._rows)

    def keep_random(self, rows: Tensor, logits: Tensor) -> None:
        """Replace the rows that are drawn at random: int64 ``[k]`` rows, ascending, and their logits."""
        assert self.values is not None
        places = torch.searchsorted(rows, self._rows).clamp_(max=rows.shape[0] - 1)
        is_random = (rows[places] == self._rows)[:, None]  # selecting rows by a mask would make the host wait
        self.values = torch.where(is_random, logits[places], self.values)


@dataclass(frozen=True, slots=True)
class GatheredLogprobs:
    """Log-probabilities of sampled tokens, on the device that computed them.

    Attributes:
        metadata: Which rows need them.
        tensors: Token ids int32 ``[m, 1 + k]``, log-probabilities float32 ``[m, 1 + k]``, ranks int32 ``[m]``; and
            those of ``metadata.listed`` if there are some, float32 ``[p, l]``.
    """

    metadata: LogprobsMetadata
    tensors: tuple[Tensor, ...]

    def arrays(self, tensors: Sequence[Tensor]) -> LogprobsArrays:
        """Log-probabilities in host memory, from copies of ``tensors`` there, which may be overwritten."""
        all_ids, all_values, ranks, *listed = (tensor.numpy() for tensor in tensors)
        num_logprobs = self.metadata.num_logprobs
        unwanted = np.arange(all_ids.shape[1] - 1)[None, :] >= num_logprobs[:, None]
        all_ids[:, 1:][unwanted] = -1
        if self.metadata.listed is not None:
            all_ids, all_values = self.metadata.listed.join(all_ids, all_values, *listed)
        return LogprobsArrays(self.metadata.host_rows, all_ids, all_values, ranks)
