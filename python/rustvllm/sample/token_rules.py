"""Rules for single token ids: allowed ids, bad words, and biases.

Each rule is a list of pairs of row and id for all rows at once, so a step needs only a few operations, regardless of
how many rows have rules.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Rules of the sampled rows, on the device; None where no row has such a rule.

    Attributes:
        limited_rows: int64 ``[a]``, rows that may sample only allowed ids.
        allowed_rows: int64 ``[k]``; with ``allowed_ids``, the pairs that these rows may sample.
        allowed_ids: int64 ``[k]``.
        banned_rows: int64 ``[b]``; with ``banned_ids``, the pairs that are bad words of a single token.
        banned_ids: int64 ``[b]``.
        word_rows: int64 ``[w]``; with ``word_ids``, the last tokens of bad words of several tokens.
        word_ids: int64 ``[w]``.
        word_matches: bool ``[w]``, whether the output ends with the other tokens of the word.
        bias_rows: int64 ``[l]``; with ``bias_ids``, the pairs that have a bias.
        bias_ids: int64 ``[l]``.
        biases: float32 ``[l]``.
    """

    limited_rows: Tensor | None = None
    allowed_rows: Tensor | None = None
    allowed_ids: Tensor | None = None
    banned_rows: Tensor | None = None
    banned_ids: Tensor | None = None
    word_rows: Tensor | None = None
    word_ids: Tensor | None = None
    word_matches: Tensor | None = None
    bias_rows: Tensor | None = None
    bias_ids: Tensor | None = None
    biases: Tensor | None = None


def ban_tokens(logits: Tensor, rules: TokenRules) -> None:
    """Set ids that are not allowed, and then bad words, to minus infinity, in place.

    Args:
        logits: float32 ``[n, vocab_size]``.
        rules: The rows and their rules.
    """
    if rules.limited_rows is not None and rules.allowed_rows is not None and rules.allowed_ids is not None:
        allowed = logits[rules.allowed_rows, rules.allowed_ids]
        logits[rules.limited_rows] = -torch.inf
        logits[rules.allowed_rows, rules.allowed_ids] = allowed
    if rules.banned_rows is not None and rules.banned_ids is not None:
        logits[rules.banned_rows, rules.banned_ids] = -torch.inf
    if rules.word_rows is not None and rules.word_ids is not None and rules.word_matches is not None:
        # Added, not assigned: several words may end in one token, and one that does not match must not undo another.
        change = torch.where(rules.word_matches, -torch.inf, 0.0).to(logits.dtype)
        logits.index_put_((rules.word_rows, rules.word_ids), change, accumulate=True)


def add_bias(logits: Tensor, rules: TokenRules) -> None:
    """Add the biases, in place; each pair occurs once.

    Args:
        logits: float32 ``[n, vocab_size]``.
        rules: The rows and their rules.
    """
    if rules.bias_rows is not None and rules.bias_ids is not None and rules.biases is not None:
        logits.index_put_((rules.bias_rows, rules.bias_ids), rules.biases, accumulate=True)
