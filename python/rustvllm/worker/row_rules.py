"""The token rules of requests, by persistent row: added once, and combined for the rows of a step.

A row without rules costs nothing. A bad word of several tokens depends on how the output ends, so one array on the
device holds the last ids of each output, and each sampled token shifts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rustvllm.sample.token_rules import TokenRules
from rustvllm.worker.step_buffers import send_array

if TYPE_CHECKING:
    from rustvllm._core import SamplingExtras
    from rustvllm.worker.drafts.verify import DeviceDrafts

_Ids = npt.NDArray[np.int64]
_NOTHING = -1
"""Fills ``_recent`` where an output is shorter than the row."""
_ANYTHING = -2
"""Pads bad words that are shorter than the longest; matches every id."""


@dataclass(frozen=True, slots=True)
class _Rules:
    """The rules of one request, on the host."""

    allowed_ids: _Ids
    banned_ids: _Ids
    beginnings: _Ids  # [words, longest − 1], padded on the left
    last_ids: _Ids  # [words]
    bias_ids: _Ids
    biases: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SelectedRules:
    """The rules of the sampled rows, valid while the rows stay the same, without what depends on the step."""

    rules: TokenRules
    persistent_rows: Tensor | None  # int64 [w], the row of each bad word of several tokens
    beginnings: Tensor | None  # int64 [w, longest − 1]


class RowRules:
    """Rules by persistent row."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._device = device
        self._by_row: dict[int, _Rules] = {}
        # Column −1 is the newest id.
        self._recent = torch.full((num_rows, 0), _NOTHING, dtype=torch.int64, device=device)

    @property
    def is_empty(self) -> bool:
        """Whether no row has rules."""
        return not self._by_row

    def admit(self, row: int, extras: SamplingExtras, output_token_ids: Sequence[int]) -> None:
        """Add the rules of a new or resumed request.

        Args:
            row: Its persistent row.
            extras: Its list parameters; all ids are in the vocabulary.
            output_token_ids: The tokens it has generated so far.
        """
        words = extras["bad_words"]
        several = [word for word in words if len(word) > 1]
        longest = max(map(len, several), default=1) - 1
        bias = extras["logit_bias"]
        rules = _Rules(
            allowed_ids=np.asarray(extras["allowed_token_ids"], np.int64),
            banned_ids=np.asarray([word[0] for word in words if len(word) == 1], np.int64),
            beginnings=np.asarray(
                [[_ANYTHING] * (longest + 1 - len(word)) + word[:-1] for word in several], np.int64
            ).reshape(len(several), longest),
            last_ids=np.asarray([word[-1] for word in several], np.int64),
            bias_ids=np.asarray([token_id for token_id, _ in bias], np.int64),
            biases=np.asarray([value for _, value in bias], np.float32),
        )
        if not any(part.size for part in (rules.allowed_ids, rules.banned_ids, rules.last_ids, rules.bias_ids)):
            return
        self._by_row[row] = rules
        if not several:
            return
        width = self._recent.shape[1]
        if longest > width:
            padding = self._recent.new_full((self._recent.shape[0], longest - width), _NOTHING)
            self._recent = torch.cat((padding, self._recent), dim=1)
            width = longest
        recent = [_NOTHING] * width + list(output_token_ids)
        self._recent[row] = self._send(np.asarray(recent[-width:], np.int64))

    def drop(self, rows: npt.NDArray[np.int32]) -> None:
        """Forget the requests that were in some rows."""
        if self._by_row:
            for row in rows.tolist():
                self._by_row.pop(row, None)

    def select(self, rows: npt.NDArray[np.int32]) -> SelectedRules | None:
        """The combined rules of the sampled rows; None if no row has any."""
        if not self._by_row:
            return None
        chosen = [(index, row, rules) for index, row in enumerate(rows.tolist()) if (rules := self._by_row.get(row))]
        if not chosen:
            return None
        indices = np.array([index for index, _, _ in chosen])
        all_rules = [rules for _, _, rules in chosen]

        def pairs(ids: list[_Ids]) -> tuple[Tensor | None, Tensor | None]:
            if not any(each.size for each in ids):
                return None, None
            return self._send(np.repeat(indices, [each.size for each in ids])), self._send(np.concatenate(ids))

        allowed_rows, allowed_ids = pairs([rules.allowed_ids for rules in all_rules])
        banned_rows, banned_ids = pairs([rules.banned_ids for rules in all_rules])
        word_rows, word_ids = pairs([rules.last_ids for rules in all_rules])
        bias_rows, bias_ids = pairs([rules.bias_ids for rules in all_rules])
        limited = indices[[rules.allowed_ids.size > 0 for rules in all_rules]]
        token_rules = TokenRules(
            limited_rows=None if allowed_rows is None else self._send(limited),
            allowed_rows=allowed_rows,
            allowed_ids=allowed_ids,
            banned_rows=banned_rows,
            banned_ids=banned_ids,
            word_rows=word_rows,
            word_ids=word_ids,
            bias_rows=bias_rows,
            bias_ids=bias_ids,
            biases=None if bias_rows is None else self._send(np.concatenate([rules.biases for rules in all_rules])),
        )
        if word_rows is None:
            return SelectedRules(token_rules, None, None)
        with_words = [(row, rules.beginnings) for _, row, rules in chosen if rules.last_ids.size]
        longest = max(beginnings.shape[1] for _, beginnings in with_words)
        return SelectedRules(
            token_rules,
            self._send(np.repeat([row for row, _ in with_words], [len(each) for _, each in with_words])),
            self._send(
                np.concatenate(
                    [
                        np.pad(each, ((0, 0), (longest - each.shape[1], 0)), constant_values=_ANYTHING)
                        for _, each in with_words
                    ]
                )
            ),
        )

    def now(self, selected: SelectedRules, drafts: DeviceDrafts | None = None) -> TokenRules:
        """The rules of a step, with matches of bad words; the drafts before a row of logits count as its output."""
        if selected.persistent_rows is None or selected.beginnings is None:
            return selected.rules
        beginnings = selected.beginnings
        endings = self._recent[selected.persistent_rows]
        if drafts is not None and selected.rules.word_rows is not None:
            endings = drafts.push(endings, selected.rules.word_rows)
        endings = endings[:, self._recent.shape[1] - beginnings.shape[1] :]
        matches = ((endings == beginnings) | (beginnings == _ANYTHING)).all(dim=1)
        return replace(selected.rules, word_matches=matches)

    def append(self, rows: npt.NDArray[np.int32], token_ids: Tensor) -> None:
        """Remember sampled tokens.

        Args:
            rows: ``[n]``, each once.
            token_ids: int64 ``[n]`` on the device.
        """
        if not self._by_row or not self._recent.shape[1]:
            return
        which = self._send(rows.astype(np.int64))
        self._recent[which] = torch.cat((self._recent[which, 1:], token_ids[:, None]), dim=1)

    def append_accepted(self, rows: npt.NDArray[np.int32], ids: Tensor) -> None:
        """Remember the tokens of a step with drafts.

        Args:
            rows: ``[r]``, each once.
            ids: int32 ``[r, c]`` on the device; negative after the last id of a row.
        """
        if not self._by_row or not self._recent.shape[1]:
            return
        which = self._send(rows.astype(np.int64))
        longer = torch.cat((self._recent[which], ids.to(torch.int64)), dim=1)
        columns = torch.arange(self._recent.shape[1], device=ids.device)
        num_new = (ids >= 0).sum(dim=1, keepdim=True)
        self._recent[which] = longer.gather(1, num_new + columns)

    def _send(self, array: npt.NDArray[np.generic]) -> Tensor:
        return send_array(array, self._device)
