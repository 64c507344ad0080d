"""Scores of tokens that were sampled or are in a prompt: log-probabilities or logits, ranks, and the likeliest tokens.

On the CPU, the core reads the wanted rows twice; elsewhere, they cost a log-softmax and a top-k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rustvllm.sample.cpu_draw import CpuDraw
from rustvllm.sample.logprobs import GatheredLogprobs, LogprobsMetadata
from rustvllm.sample.metadata import SamplingMetadata

TokenScores = tuple[Tensor, ...]
"""For ``m`` rows with one token each: ids int32 ``[m, 1 + k]``, the token and then the ``k`` likeliest ids of its row;
their log-probabilities or logits, float32 ``[m, 1 + k]``; the tokens' ranks, int32 ``[m]``, from 1. If further tokens
are named for ``p`` of the rows, also theirs, float32 ``[p, l]``."""
Listed = tuple[Tensor, Tensor]
"""Further tokens for some of ``m`` rows: indices of the rows, int64 ``[p]``, and ids for each, int64 ``[p, l]``."""


@dataclass(frozen=True, slots=True)
class KeptLogits:
    """Logits that do not change until the tokens are known.

    Attributes:
        metadata: Which rows need scores.
        values: float ``[n, vocab_size]``: logits, or log-probabilities.
        rows: int64 ``[m]``, the rows of ``values`` that need scores; None if all do.
        to_normalize: Whether log-probabilities are wanted while ``values`` has logits.
    """

    metadata: LogprobsMetadata
    values: Tensor
    rows: Tensor | None
    to_normalize: bool


class Scorer:
    """Scores tokens; stateless.

    Args:
        mode: What the scores of sampled tokens are, one of ``config.LOGPROBS_MODES``.
        cpu_draw: Scores on the CPU; None if torch does.
    """

    def __init__(self, mode: str = "raw_logprobs", cpu_draw: CpuDraw | None = None) -> None:
        self.reads_processed = mode.startswith("processed")
        self._normalizes = mode.endswith("logprobs")
        self._cpu_draw = cpu_draw

    def keep_raw(self, logits: Tensor, metadata: SamplingMetadata, *, will_mask: bool) -> KeptLogits | None:
        """Keep the rows that need scores, before the sampler may change them.

        Args:
            logits: float ``[n, vocab_size]``.
            metadata: How the rows will be sampled.
            will_mask: Whether a grammar will mask them first.

        Returns:
            None if no row needs scores, or if the mode needs processed logits (``of_processed``).
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
        """The logits that the sampler drew from, for the rows that need scores; None if it did not keep them."""
        if metadata.logprobs is None or metadata.processed is None or metadata.processed.values is None:
            return None
        return KeptLogits(metadata.logprobs, metadata.processed.values, None, self._normalizes)

    def score_sampled(self, kept: KeptLogits, token_ids: Tensor) -> GatheredLogprobs:
        """Score the sampled tokens of the rows that need it; the host does not wait.

        Args:
            kept: The rows.
            token_ids: int64 ``[n]``, the sampled ids of all rows.
        """
        wanted = kept.metadata
        count = min(int(wanted.num_logprobs.max()), kept.values.shape[-1])
        own = token_ids.index_select(0, wanted.rows)
        listed = None if wanted.listed is None else (wanted.listed.rows, wanted.listed.ids)
        scores = self._score(kept.values, kept.rows, own, count, listed, to_normalize=kept.to_normalize)
        return GatheredLogprobs(wanted, scores)

    def score(self, logits: Tensor, token_ids: Tensor, count: int, listed: Listed | None = None) -> TokenScores:
        """Log-probabilities of one token of each row, in any mode; the host does not wait.

        Args:
            logits: float ``[m, vocab_size]``.
            token_ids: int64 ``[m]``.
            count: How many of the likeliest tokens to add, at most ``vocab_size``.
            listed: Further tokens of some of the rows.
        """
        return self._score(logits, None, token_ids, count, listed, to_normalize=True)

    def _score(
        self,
        values: Tensor,
        rows: Tensor | None,
        token_ids: Tensor,
        count: int,
        listed: Listed | None,
        *,
        to_normalize: bool,
    ) -> TokenScores:
        if self._cpu_draw is not None:
            values = values.to(torch.float32).contiguous()
            rows = torch.arange(len(values)) if rows is None else rows
            *scored, log_totals = self._cpu_draw.score(values, rows, token_ids, count, is_normalized=to_normalize)
            if listed is None:
                return tuple(scored)
            which, named_ids = listed  # only their logits are read once more
            named = values[rows[which][:, None], named_ids].to(torch.float64) - log_totals[which][:, None]
            return (*scored, named.to(torch.float32))
        values = values if rows is None else values.index_select(0, rows)
        values = values.log_softmax(dim=-1, dtype=torch.float32) if to_normalize else values.to(torch.float32)
        own = values.gather(1, token_ids[:, None])  # [m, 1]
        ranks = (values > own).sum(dim=-1) + 1
        top, top_ids = largest(values, count)
        ids = torch.cat((token_ids[:, None], top_ids), dim=1).to(torch.int32)
        scores = ids, torch.cat((own, top), dim=1), ranks.to(torch.int32)
        return scores if listed is None else (*scores, values[listed[0][:, None], listed[1]])


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest numbers of each row and their indices, largest first; of equal ones the first index comes first.

    With ``topk`` alone, the choice and order of equal ones depends on ``count``, which other rows may determine.

    Args:
        values: float32 ``[m, n]``.
        count: How many, at most ``n``.
    """
    if values.device.type != "cpu":  # where the check of the result below would wait for the device
        return _largest_of_pairs(values, count)
    found, ids = values.topk(min(count + 1, values.shape[-1]), dim=-1)
    is_cut = torch.zeros(len(values), dtype=torch.bool)
    if 0 < count < found.shape[1]:
        is_cut = found[:, count - 1] == found[:, count]
    ids, order = ids[:, :count].sort(dim=-1)
    found, order = found[:, :count].gather(-1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)
    if is_cut.any():  # more numbers equal the last one
        found[is_cut], ids[is_cut] = _largest_of_pairs(values[is_cut], count)
    return found, ids


def _largest_of_pairs(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """See ``largest``; combines each value and its index into one number to compare."""
    bits = (values + 0.0).view(torch.int32)  # −0 becomes +0
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(torch.int64)  # integers in the order of the floats
    places = torch.arange(values.shape[-1], device=values.device)
    ids = ordered.mul_(2**32).sub_(places).topk(count, dim=-1).indices
    return values.gather(-1, ids), ids
