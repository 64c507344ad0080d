"""Log-probabilities of sampled tokens, of the rows that ask: of the raw logits, before anything changes them, or of
what is drawn from.

Cost: one log-softmax and one top-k over the rows that ask; nothing for a batch without such rows.
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


def raw_logits(logits: Tensor, metadata: LogprobsMetadata) -> Tensor:
    """The asking rows, float32 ``[m, vocab_size]``: a copy, taken before the sampler changes the logits."""
    return logits.index_select(0, metadata.rows).to(torch.float32)


def raw_logprobs(logits: Tensor, metadata: LogprobsMetadata) -> Tensor:
    """Log-softmax of the asking rows, float32 ``[m, vocab_size]``; taken before the sampler changes the logits."""
    asking = logits if metadata.host_rows.size == logits.shape[0] else logits.index_select(0, metadata.rows)
    return asking.log_softmax(dim=-1, dtype=torch.float32)


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


def gather_logprobs(raw: Tensor, token_ids: Tensor, metadata: LogprobsMetadata) -> GatheredLogprobs:
    """What is to be said of the tokens that were sampled; the host waits for nothing.

    Args:
        raw: float32 ``[m, vocab_size]``: log-probabilities, or logits where these are what is wanted.
        token_ids: int64 ``[n]``, sampled, of all rows.
        metadata: Which rows ask.
    """
    sampled = token_ids.index_select(0, metadata.rows)[:, None]  # [m, 1]
    own = raw.gather(1, sampled)  # [m, 1]
    ranks = (raw > own).sum(dim=-1) + 1  # [m]
    most = min(int(metadata.num_logprobs.max()), raw.shape[-1])
    values, ids = largest(raw, most)  # [m, most]
    all_ids = torch.cat((sampled, ids), dim=1).to(torch.int32)
    return GatheredLogprobs(metadata, (all_ids, torch.cat((own, values), dim=1), ranks.to(torch.int32)))


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest numbers of each row and their places, largest first, and of equal ones the first place first.

    ``topk`` alone takes and orders equal ones by how many are asked for, which other rows may decide.

    Args:
        values: float32 ``[m, n]``.
        count: How many, at most ``n``.
    """
    if values.device.type != "cpu":  # where a look at what was found would wait for the device
        return _largest_of_pairs(values, count)
    found, ids = values.topk(min(count + 1, values.shape[-1]), dim=-1)
    is_cut = torch.zeros(len(values), dtype=torch.bool)
    if 0 < count < found.shape[1]:
        is_cut = found[:, count - 1] == found[:, count]
    ids, order = ids[:, :count].sort(dim=-1)
    found, order = found[:, :count].gather(-1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)
    if is_cut.any():  # there are more that equal the last one
        found[is_cut], ids[is_cut] = _largest_of_pairs(values[is_cut], count)
    return found, ids


def _largest_of_pairs(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As ``largest``, from numbers that a value and its place are together."""
    bits = (values + 0.0).view(torch.int32)  # of both zeros those of one
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(torch.int64)  # as the numbers are
    places = torch.arange(values.shape[-1], device=values.device)
    ids = ordered.mul_(2**32).sub_(places).topk(count, dim=-1).indices
    return values.gather(-1, ids), ids
