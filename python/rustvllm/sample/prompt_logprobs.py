"""Log-probabilities of prompts, from the raw logits of a limited number of rows at a time, so that the logits of a
whole prompt never exist at once.

They cost the head for every prompt token, which a step otherwise does not compute. Only steps whose requests ask for
them pay this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rustvllm.sample.prompt_tokens import NamedPromptTokens
from rustvllm.sample.scorer import Listed, TokenScores

MAX_ROWS = 256
MAX_ELEMENTS = 1 << 22
"""The most rows of logits, and the most logits, that exist at a time: 16 MiB in float32, and on a GPU 64 to sort them.
A single row may always have more."""


@dataclass(frozen=True, slots=True)
class PromptLogprobsArrays:
    """Log-probabilities of prompt tokens in host memory, in the form that ``Scheduler.update_from_output`` takes.

    Attributes:
        num_columns: int32 ``[s]``, candidates per token, for each request that asks.
        token_ids: int32, the prompt token and then the likeliest ones and those that the request names, −1 for one that
            it does not, for each token; row after row without gaps.
        logprobs: float32, natural logarithms, one for each of ``token_ids``.
        ranks: int32 ``[n]``, rank of each prompt token, from 1.
    """

    num_columns: npt.NDArray[np.int32]
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int32]

    def as_tuple(
        self,
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        """The arrays in the order in which the core takes them."""
        return self.num_columns, self.token_ids, self.logprobs, self.ranks


@dataclass(frozen=True, slots=True)
class GatheredPromptLogprobs:
    """Log-probabilities of prompt tokens, on the device that computed them.

    Attributes:
        num_columns: See ``PromptLogprobsArrays.num_columns``.
        widths: int32 ``[n]``, candidates of each prompt token, without those that its request names.
        tensors: Token ids int32 ``[m, k]``, log-probabilities float32 ``[m, k]`` and ranks int32 ``[m]`` of each piece,
            piece after piece; ``k`` is the largest width in the piece. If requests name tokens, also those of the named
            ones, float32 ``[p, l]``, after each piece's ranks.
        named: The tokens that requests name; None if none does.
        named_widths: int32 ``[n]``, how many of them each prompt token has.
    """

    num_columns: npt.NDArray[np.int32]
    widths: npt.NDArray[np.int32]
    tensors: tuple[Tensor, ...]
    named: NamedPromptTokens | None = None
    named_widths: npt.NDArray[np.int32] | None = None

    def arrays(self, tensors: Sequence[Tensor]) -> PromptLogprobsArrays:
        """Log-probabilities in host memory, from copies of ``tensors`` there."""
        if self.named is not None:
            return self._with_named(self.named, tensors)
        all_ids, all_values, ranks = ([tensor.numpy() for tensor in tensors[part::3]] for part in range(3))
        ids, values, start = [], [], 0
        for piece_ids, piece_values in zip(all_ids, all_values, strict=True):
            end = start + piece_ids.shape[0]
            is_wanted = np.arange(piece_ids.shape[1]) < self.widths[start:end, None]
            ids.append(piece_ids[is_wanted])
            values.append(piece_values[is_wanted])
            start = end
        return PromptLogprobsArrays(
            self.num_columns, np.concatenate(ids), np.concatenate(values), np.concatenate(ranks)
        )

    def _with_named(self, named: NamedPromptTokens, tensors: Sequence[Tensor]) -> PromptLogprobsArrays:
        assert self.named_widths is not None
        parts = ([tensor.numpy() for tensor in tensors[part::4]] for part in range(4))
        all_ids, all_values, ranks, all_named = parts
        joined, start = [], 0
        for ids, values, named_values in zip(all_ids, all_values, all_named, strict=True):
            end = start + len(ids)
            widths, named_widths = self.widths[start:end], self.named_widths[start:end]
            joined.append(named.host.join(ids, values, widths, named_values, start, named_widths))
            start = end
        ids_of_pieces, values_of_pieces = zip(*joined, strict=True)
        return PromptLogprobsArrays(
            self.num_columns, np.concatenate(ids_of_pieces), np.concatenate(values_of_pieces), np.concatenate(ranks)
        )


def prompt_logprobs(
    hidden: Tensor,
    compute_logits: Callable[[Tensor], Tensor],
    vocab_size: int,
    targets: Tensor,
    num_rows: npt.NDArray[np.int32],
    num_logprobs: npt.NDArray[np.int64],
    score: Callable[[Tensor, Tensor, int, Listed | None], TokenScores],
    named: NamedPromptTokens | None = None,
) -> GatheredPromptLogprobs:
    """Compute log-probabilities of prompt tokens; the host does not wait.

    Args:
        hidden: ``[n, hidden_size]``, hidden states of the tokens before the scored ones, request after request.
        compute_logits: The model's head, ``[m, hidden_size]`` → ``[m, vocab_size]``.
        vocab_size: The width of the logits.
        targets: int ``[n]``, the scored token that follows each of them, on the device.
        num_rows: int32 ``[s]``, how many of them each request has.
        num_logprobs: int64 ``[s]``, how many of the likeliest tokens each gets in addition to the token itself.
        score: ``Scorer.score``.
        named: Further tokens that requests name; None if none does.
    """
    wanted = 1 + np.minimum(num_logprobs, vocab_size).astype(np.int32)  # [s]
    width_of_row = np.repeat(wanted, num_rows)  # [n]
    rows_at_a_time = max(1, min(MAX_ROWS, MAX_ELEMENTS // vocab_size))
    tensors: list[Tensor] = []
    for start in range(0, len(hidden), rows_at_a_time):
        end = min(start + rows_at_a_time, len(hidden))
        widths = width_of_row[start:end]
        own_ids = targets[start:end].to(torch.int64)
        listed = None if named is None else named.between(start, end)
        tensors += score(compute_logits(hidden[start:end]), own_ids, int(widths.max()) - 1, listed)
    if named is None:
        return GatheredPromptLogprobs(wanted, width_of_row, tuple(tensors))
    named_widths = np.repeat(named.host.widths, num_rows)
    return GatheredPromptLogprobs(
        wanted + named.host.widths, width_of_row, tuple(tensors), named=named, named_widths=named_widths
    )
