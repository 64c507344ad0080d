"""Tokens that requests name for the places of their prompts, to get the log-probabilities of exactly these.

They are kept by persistent row; a step takes the rows of the places that it scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # the simulated executor loads no torch
    from torch import Tensor

_Ids = npt.NDArray[np.int32]
_Values = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class NamedRows:
    """The named tokens of the places that a step scores, in host memory.

    Attributes:
        widths: int32 ``[s]``, tokens per place of each request that asks for log-probabilities; 0: it names none.
        rows: int64 ``[q]``, which of the scored places belong to requests that name tokens, ascending.
        ids: int32 ``[q, l]``, the tokens; −1 where a place has fewer.
    """

    widths: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int64]
    ids: _Ids

    def join(
        self, ids: _Ids, values: _Values, own_widths: npt.NDArray[np.int32], named: _Values, first: int, widths: _Ids
    ) -> tuple[_Ids, _Values]:
        """Put the named tokens behind the others of some of the scored places.

        Args:
            ids: int32 ``[n, k]``, other tokens of consecutive places.
            values: float32 ``[n, k]``, of these.
            own_widths: ``[n]``, how many of them each place gets.
            named: float32 ``[p, l]``, of the named tokens of those among the places that have some.
            first: The first of the places, among all that the step scores.
            widths: int32 ``[n]``, named tokens of each place.

        Returns:
            Ids and values, place after place without gaps; minus infinity where a row has fewer tokens.
        """
        begin, end = np.searchsorted(self.rows, (first, first + len(ids)))
        which, named_ids = self.rows[begin:end] - first, self.ids[begin:end]
        all_ids = np.full((len(ids), self.ids.shape[1]), -1, np.int32)
        all_values = np.full(all_ids.shape, -np.inf, np.float32)
        all_ids[which], all_values[which] = named_ids, np.where(named_ids < 0, -np.inf, named)
        is_wanted = np.concatenate(
            (
                np.arange(ids.shape[1]) < own_widths[:, None],
                np.arange(all_ids.shape[1]) < widths[:, None],
            ),
            axis=1,
        )
        return (
            np.concatenate((ids, all_ids), axis=1)[is_wanted],
            np.concatenate((values, all_values), axis=1)[is_wanted],
        )


@dataclass(frozen=True, slots=True)
class NamedPromptTokens:
    """The named tokens of the places that a step scores, on the device.

    Attributes:
        host: The named tokens in host memory.
        rows: int64 ``[q]``.
        ids: int64 ``[q, l]``; 0 where a place has fewer.
    """

    host: NamedRows
    rows: Tensor
    ids: Tensor

    def between(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Of the places ``[start, end)``: indices from ``start`` on, and their tokens."""
        begin, stop = np.searchsorted(self.host.rows, (start, end))
        return self.rows[begin:stop] - start, self.ids[begin:stop]


class RowPromptTokens:
    """Named tokens of prompts by persistent row."""

    def __init__(self) -> None:
        self._by_row: dict[int, tuple[int, _Ids]] = {}

    def admit(self, row: int, prompt_tokens: tuple[int, bool, int, bytes] | None) -> None:
        """Add those of a new or resumed request, as ``SamplingExtras.prompt_tokens`` has them."""
        if prompt_tokens is not None:
            start, _, width, ids = prompt_tokens
            self._by_row[row] = start, np.frombuffer(ids, np.int32).reshape(-1, width)

    def drop(self, rows: npt.NDArray[np.int32]) -> None:
        """Forget the requests that were in some rows."""
        if self._by_row:
            for row in rows.tolist():
                self._by_row.pop(row, None)

    def find(
        self, rows: npt.NDArray[np.int32], first_places: npt.NDArray[np.int32], num_places: npt.NDArray[np.int32]
    ) -> NamedRows | None:
        """The named tokens of consecutive places of some prompts; None if they name none.

        Args:
            rows: ``[s]``, persistent rows.
            first_places: ``[s]``, the first place of each, whose logits are about the token behind it.
            num_places: ``[s]``, how many places.
        """
        if not self._by_row:
            return None
        widths, which, tables = np.zeros(len(rows), np.int32), [], []
        begin = 0
        for index, (row, first, count) in enumerate(
            zip(rows.tolist(), first_places.tolist(), num_places.tolist(), strict=True)
        ):
            if (found := self._by_row.get(row)) is not None:
                start, table = found
                widths[index] = table.shape[1]
                # A request before its first row, or one whose table does not fit its prompt, names nothing there.
                wanted = np.arange(first - start, first - start + count)
                inside = np.flatnonzero((wanted >= 0) & (wanted < len(table)))
                which.append(begin + inside)
                tables.append(table[wanted[inside]])
            begin += count
        if not tables:
            return None
        longest = int(widths.max())
        padded = [np.pad(ids, ((0, 0), (0, longest - ids.shape[1])), constant_values=-1) for ids in tables]
        return NamedRows(widths, np.concatenate(which), np.concatenate(padded))

    def select(
        self,
        rows: npt.NDArray[np.int32],
        first_places: npt.NDArray[np.int32],
        num_places: npt.NDArray[np.int32],
        send: Callable[[npt.NDArray[Any]], Tensor],
    ) -> NamedPromptTokens | None:
        """What ``find`` returns, on the device, where ``send`` copies arrays."""
        found = self.find(rows, first_places, num_places)
        if found is None:
            return None
        return NamedPromptTokens(found, send(found.rows), send(found.ids.clip(min=0).astype(np.int64)))
