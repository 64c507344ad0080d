"""Counts how often each token id occurs in requests with penalties, updated token by token."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rustvllm.worker.step_buffers import send_array

TokenIds = Callable[[int], list[int]]
"""Returns prompt and output of the request in a persistent row (``_core.Scheduler.token_ids``)."""


class TokenCounts:
    """Counts for the rows that need them; a row without penalties costs nothing.

    A row's counts are made when a request with penalties gets the row, also after a preemption, and from then on only
    incremented. On a GPU, the first such request allocates memory for all rows (``num_bytes``), which never moves; on
    other devices the memory grows.

    Attributes:
        output_counts: int32 ``[capacity, vocab_size]``.
        prompt_mask: bool ``[capacity, vocab_size]``.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._num_rows = num_rows
        self._slot_of_row = np.full(num_rows, -1, np.int64)
        self._free: list[int] = []
        self.output_counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self.prompt_mask = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)

    @property
    def num_bytes(self) -> int:
        """Memory of the counts of all rows."""
        return self._num_rows * self.output_counts.shape[1] * (torch.int32.itemsize + torch.bool.itemsize)

    def admit(self, row: int, token_ids: list[int], num_prompt_tokens: int) -> None:
        """Count the tokens of the request in ``row``."""
        slot = self._take_slot()
        self._slot_of_row[row] = slot
        ids = self._send(np.asarray(token_ids, np.int64))
        self.prompt_mask[slot, ids[:num_prompt_tokens]] = True
        output = ids[num_prompt_tokens:]
        self.output_counts[slot].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def drop(self, rows: npt.NDArray[np.int32]) -> None:
        """Forget the requests that were in some rows."""
        slots = self._slot_of_row[rows]
        slots = slots[slots >= 0]
        if slots.size:
            self._slot_of_row[rows] = -1
            on_device = self._send(slots)
            self.output_counts[on_device] = 0
            self.prompt_mask[on_device] = False
            self._free.extend(slots.tolist())

    def slots(self, rows: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """The index of each row's counts; −1 for a row without counts."""
        return self._slot_of_row[rows]

    def add(self, rows: npt.NDArray[np.int32], token_ids: Tensor) -> None:
        """Count one new token of each row that has counts.

        Args:
            rows: ``[n]``, each once.
            token_ids: int64 ``[n]`` on the device.
        """
        slots = self._slot_of_row[rows]
        counted = np.flatnonzero(slots >= 0)
        if counted.size:
            ids = token_ids[self._send(counted)]
            self.output_counts[self._send(slots[counted]), ids] += 1

    def add_accepted(self, rows: npt.NDArray[np.int32], ids: Tensor) -> None:
        """Count the tokens that a step with drafts gave each row.

        Args:
            rows: ``[r]``, each once.
            ids: int32 ``[r, c]`` on the device; negative after the last id of a row.
        """
        slots = self._slot_of_row[rows]
        counted = np.flatnonzero(slots >= 0)
        if counted.size:
            chosen = ids[self._send(counted)].to(torch.int64)  # [k, c]
            in_slots = self._send(slots[counted])[:, None].expand_as(chosen)
            once = (chosen >= 0).to(self.output_counts.dtype)
            self.output_counts.index_put_((in_slots, chosen.clamp(min=0)), once, accumulate=True)

    def _take_slot(self) -> int:
        if not self._free:
            capacity, vocab_size = self.output_counts.shape
            grown = max(4, capacity)
            if self.output_counts.device.type == "cuda":
                grown = self._num_rows  # all at once: old and new memory exist together while it grows
            self.output_counts = torch.cat((self.output_counts, self.output_counts.new_zeros(grown, vocab_size)))
            self.prompt_mask = torch.cat((self.prompt_mask, self.prompt_mask.new_zeros(grown, vocab_size)))
            self._free.extend(range(capacity, capacity + grown))
        return self._free.pop()

    def _send(self, array: npt.NDArray[np.int64]) -> Tensor:
        return send_array(array, self.output_counts.device)
