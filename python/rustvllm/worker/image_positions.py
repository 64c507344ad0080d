"""The positions by which a step's tokens are rotated, where images count for fewer positions than they have tokens.

In such models (Qwen-VL) a position has three parts: time, height and width. All tokens of an image have one time, and
their row and column as height and width. What follows an image begins behind its longer side, so that its positions are
smaller than its places in the sequence, for the rest of the prompt and for the output.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rustvllm.layers.rotary import NUM_AXES


class ImagePositions:
    """Positions by persistent row.

    Args:
        max_num_seqs: How many rows there are.
    """

    def __init__(self, max_num_seqs: int) -> None:
        # Added to the places of tokens behind the last image.
        self._shifts = np.zeros(max_num_seqs, np.int32)
        self._rows: set[int] = set()
        # int32 [3, n], of the first n tokens of prompts whose images are not all computed yet.
        self._prompts: dict[int, npt.NDArray[np.int32]] = {}

    def admit(self, row: int, images: Sequence[tuple[int, int, int]]) -> None:
        """Take the images of a request: of each the place of its first token, the rows and the columns of its grid."""
        self._prompts[row], self._shifts[row] = prompt_positions(images)
        self._rows.add(row)

    def drop(self, rows: npt.NDArray[np.int32]) -> None:
        """Forget the requests of some rows."""
        if self._rows:
            for row in self._rows.intersection(rows.tolist()):
                self._rows.discard(row)
                self._prompts.pop(row, None)
                self._shifts[row] = 0

    def of_step(
        self, rows: npt.NDArray[np.int32], starts: npt.NDArray[np.int32], places: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int32] | None:
        """The positions of a step's tokens.

        Args:
            rows: ``[num_reqs]``, the persistent row of each request.
            starts: ``[num_reqs + 1]``, each request's first token in the step.
            places: ``[num_tokens]``, the place of each token in its sequence.

        Returns:
            ``[num_tokens]`` if all parts of each position are equal, else ``[3, num_tokens]``; None if ``places`` are
            the positions.
        """
        if not self._rows:
            return None
        positions = places + np.repeat(self._shifts[rows], np.diff(starts))
        if not self._prompts:
            return positions
        found: npt.NDArray[np.int32] | None = None
        for index, row in enumerate(rows.tolist()):
            if (known := self._prompts.get(row)) is None:
                continue
            begin, end = int(starts[index]), int(starts[index + 1])
            first = int(places[begin])
            if (count := min(end - begin, known.shape[1] - first)) > 0:
                found = np.tile(positions, (NUM_AXES, 1)) if found is None else found
                found[:, begin : begin + count] = known[:, first : first + count]
            if first + end - begin >= known.shape[1]:
                del self._prompts[row]  # a preempted request comes back as a new row
        return positions if found is None else found


def prompt_positions(images: Sequence[tuple[int, int, int]]) -> tuple[npt.NDArray[np.int32], int]:
    """The positions of a prompt's tokens up to the last one of an image.

    Args:
        images: In their order: the place of the first token, rows, columns.

    Returns:
        int32 ``[3, n]``, and what is added to the places of all later tokens.
    """
    parts: list[npt.NDArray[np.int32]] = []
    length = shift = 0
    for place, rows, columns in images:
        text = np.arange(length, place, dtype=np.int32) + np.int32(shift)
        height, width = np.divmod(np.arange(rows * columns, dtype=np.int32), np.int32(columns))
        of_image = np.stack((np.zeros_like(height), height, width)) + np.int32(place + shift)
        parts += [np.tile(text, (NUM_AXES, 1)), of_image]
        length = place + rows * columns
        shift += max(rows, columns) - rows * columns
    return np.concatenate(parts, axis=1), shift
