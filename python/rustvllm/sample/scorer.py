"""How likely tokens are that were sampled or that a prompt has: log-probabilities, ranks, and the likeliest tokens.

Cost: on the CPU the core reads the rows that ask twice; elsewhere one log-softmax and one top-k. Nothing for a batch
without such rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rustvllm.sample.cpu_draw import CpuDraw
from rustvllm.sample.logprobs import GatheredLogprobs, LogprobsMetadata
from rustvllm.sample.metadata import SamplingMetadata

TokenScores = tuple[Tensor, Tensor, Tensor]
"""Of ``m`` tokens, each in a row of its own: ids int32 ``[m, 1 + k]``, the token and then the ``k`` likeliest of its
row; their log-probabilities or logits, float32 ``[m, 1 + k]``; ranks of the tokens int32 ``[m]``, from 1."""


@dataclass(frozen=True, slots=True)
class KeptLogits:
    """Logits that stay as they are until the tokens are known.

    Attributes:
        metadata: Which rows ask.
        values: float ``[n, vocab_size]``: logits, or log-probabilities.
        rows: int64 ``[m]``, those of them that ask; None: all, in order.
        to_normalize: Log-probabilities are asked for, and ``values`` are logits.
    """

    metadata: LogprobsMetadata
    values: Tensor
    rows: Tensor | None
    to_normalize: bool


class Scorer:
    """Scores tokens; stateless.

    Args:
        mode: What is given as log-probabilities of sampled tokens, one of ``config.LOGPROBS_MODES``.
        cpu_draw: Scores on the CPU; None: torch does.
    """

    def __init__(self, mode: str = "raw_logprobs", cpu_draw: CpuDraw | None = None) -> None:
        self.reads_processed = mode.startswith("processed")
        self._normalizes = mode.endswith("logprobs")
        self._cpu_draw = cpu_draw

    def keep_raw(self, logits: Tensor, metadata: SamplingMetadata, *, will_mask: bool) -> KeptLogits | None:
        """Keep the rows that ask, which the sampler may change.

        Args:
            logits: float ``[n, vocab_size]``.
            metadata: How they are going to be sampled.
            will_mask: They are going to be masked first.

        Returns:
            None if the sampler is to leave processed logits, or if no row asks.
        """
        wanted = metadata.logprobs
        if wanted is None or self.reads_processed:
            return None
        is_changed = will_mask or metadata.changes_logits or not logits.is_contiguous()
        if self._cpu_draw is not None and not is_changed:
            return KeptLogits(wanted, logits, wanted.rows, self._normalizes)
        asking = logits if wanted.host_rows.size == logits.shape[0] else logits.index_select(0, wanted.rows)
        if self._cpu_draw is None and self._normalizes:
            return KeptLogits(wanted, asking.log_softmax(dim=-1, dtype=torch.float32), None, to_normalize=False)
        values = asking.clone() if asking is logits else asking
        return KeptLogits(wanted, values, None, self._normalizes)

    def of_processed(self, metadata: SamplingMetadata) -> KeptLogits | None:
        """What the sampler left of the rows that ask; None if it was not asked to."""
        if metadata.logprobs is None or metadata.processed is None or metadata.processed.values is None:
            return None
        return KeptLogits(metadata.logprobs, metadata.processed.values, None, self._normalizes)

    def score_sampled(self, kept: KeptLogits, token_ids: Tensor) -> GatheredLogprobs:
        """Say of the tokens that were sampled what their requests ask; the host waits for nothing.

        Args:
            kept: The rows that ask.
            token_ids: int64 ``[n]``, sampled, of all rows.
        """
        wanted = kept.metadata
        count = min(int(wanted.num_logprobs.max()), kept.values.shape[-1])
        own = token_ids.index_select(0, wanted.rows)
        return GatheredLogprobs(wanted, self._score(kept.values, kept.rows, own, count, to_normalize=kept.to_normalize))

    def score(self, logits: Tensor, token_ids: Tensor, count: int) -> TokenScores:
        """Log-probabilities of one token of each row, whatever the mode; the host waits for nothing.

        Args:
            logits: float ``[m, vocab_size]``.
            token_ids: int64 ``[m]``.
            count: How many of the likeliest tokens are wanted too, at most ``vocab_size``.
        """
        return self._score(logits, None, token_ids, count, to_normalize=True)

    def _score(
        self, values: Tensor, rows: Tensor | None, token_ids: Tensor, count: int, *, to_normalize: bool
    ) -> TokenScores:
        if self._cpu_draw is not None:
            values = values.to(torch.float32).contiguous()
            rows = torch.arange(len(values)) if rows is None else rows
            return self._cpu_draw.score(values, rows, token_ids, count, is_normalized=to_normalize)
        values = values if rows is None else values.index_select(0, rows)
        values = values.log_softmax(dim=-1, dtype=torch.float32) if to_normalize else values.to(torch.float32)
        own = values.gather(1, token_ids[:, None])  # [m, 1]
        ranks = (values > own).sum(dim=-1) + 1
        top, top_ids = largest(values, count)
        ids = torch.cat((token_ids[:, None], top_ids), dim=1).to(torch.int32)
        return ids, torch.cat((own, top), dim=1), ranks.to(torch.int32)


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
