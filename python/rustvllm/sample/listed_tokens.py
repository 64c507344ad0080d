"""Tokens that requests name by their ids, to get the log-probabilities of exactly these.

They are kept by persistent row, and combined for the rows of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # the simulated executor loads no torch
    from torch import Tensor

_Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ListedTokens:
    """The named tokens of some of the rows that need log-probabilities.

    Attributes:
        rows: int64 ``[p]``, indices into these rows, on the device.
        ids: int64 ``[p, l]``, on the device; 0 where a row names fewer.
        host_rows: int64 ``[p]``, the same indices on the host.
        host_ids: int32 ``[p, l]``, on the host; −1 where a row names fewer.
    """

    rows: Tensor
    ids: Tensor
    host_rows: npt.NDArray[np.int64]
    host_ids: _Ids

    def join(
        self, token_ids: _Ids, values: npt.NDArray[np.float32], listed: npt.NDArray[np.float32]
    ) -> tuple[_Ids, npt.NDArray[np.float32]]:
        """Put the named tokens behind their rows' own.

        Args:
            token_ids: int32 ``[m, 1 + k]``, the own ids and then others; −1 ends a row.
            values: float32 ``[m, 1 + k]``, of these ids.
            listed: float32 ``[p, l]``, of the named tokens.

        Returns:
            Both with ``1 + max(k, l)`` columns.
        """
        return join(token_ids, values, self.host_rows, self.host_ids, listed)


def join(
    token_ids: _Ids,
    values: npt.NDArray[np.float32],
    host_rows: npt.NDArray[np.int64],
    host_ids: _Ids,
    listed: npt.NDArray[np.float32],
) -> tuple[_Ids, npt.NDArray[np.float32]]:
    """``ListedTokens.join`` for arrays on the host."""
    num_rows, width = len(token_ids), max(token_ids.shape[1], 1 + host_ids.shape[1])
    all_ids, all_values = np.full((num_rows, width), -1, np.int32), np.zeros((num_rows, width), np.float32)
    all_ids[:, : token_ids.shape[1]], all_values[:, : token_ids.shape[1]] = token_ids, values
    all_ids[host_rows, 1 : 1 + host_ids.shape[1]] = host_ids
    all_values[host_rows, 1 : 1 + host_ids.shape[1]] = listed
    return all_ids, all_values


class RowTokens:
    """Named tokens by persistent row."""

    def __init__(self) -> None:
        self._by_row: dict[int, _Ids] = {}

    def admit(self, row: int, token_ids: Sequence[int]) -> None:
        """Add those of a new or resumed request, each in the vocabulary."""
        if token_ids:
            self._by_row[row] = np.asarray(token_ids, np.int32)

    def drop(self, rows: npt.NDArray[np.int32]) -> None:
        """Forget the requests that were in some rows."""
        if self._by_row:
            for row in rows.tolist():
                self._by_row.pop(row, None)

    def find(self, rows: _Ids) -> tuple[npt.NDArray[np.int64], _Ids] | None:
        """``host_rows`` and ``host_ids`` of ``ListedTokens`` for persistent rows ``[m]``; None if they name none."""
        if not self._by_row:
            return None
        found = {index: ids for index, row in enumerate(rows.tolist()) if (ids := self._by_row.get(row)) is not None}
        if not found:
            return None
        ids = np.full((len(found), max(map(len, found.values()))), -1, np.int32)
        for each, of_row in zip(ids, found.values(), strict=True):
            each[: len(of_row)] = of_row
        return np.fromiter(found, np.int64), ids

    def select(self, rows: _Ids, send: Callable[[npt.NDArray[np.int64]], Tensor]) -> ListedTokens | None:
        """The named tokens of some rows; None if they name none.

        Args:
            rows: ``[m]``, the persistent row of each.
            send: Copies an array to the device.
        """
        found = self.find(rows)
        if found is None:
            return None
        which, ids = found
        return ListedTokens(send(which), send(ids.clip(min=0).astype(np.int64)), which, ids)
