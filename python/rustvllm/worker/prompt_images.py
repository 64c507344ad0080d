"""The images of running requests: their features, computed once, and which tokens of a step they stand for."""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic_ns
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rustvllm.config.vision import CHANNELS, GRID, HEADER_BYTES, VisionConfig
from rustvllm.exceptions import SchedulerStateError
from rustvllm.models.vision.tower import VisionTower
from rustvllm.worker.image_positions import ImagePositions
from rustvllm.worker.step_buffers import StepBuffers
from rustvllm.worker.token_counts import TokenIds

if TYPE_CHECKING:
    from rustvllm._core import SchedulerOutput

MultimodalOfRow = Callable[[int], list[tuple[int, int, bytes, bytes]]]
"""Returns the images of the request in a persistent row (``_core.Scheduler.multimodal``)."""
CACHE_BYTES: Final = 256 << 20
"""Features of images that no running request needs are kept up to this size, those used last."""


@dataclass(slots=True)
class _Image:
    """An image of a request that runs.

    Attributes:
        digest: Names it.
        content: The header and the pixels; empty once the features are there.
        positions: int64 ``[n]``, ascending: the tokens of the prompt that stand for it.
        features: ``[n, hidden_size]``; None until a step needs them.
    """

    digest: bytes
    content: bytes
    positions: npt.NDArray[np.int64]
    features: Tensor | None = None


class PromptImages:
    """Images by persistent row.

    Args:
        tower: Computes features.
        vision: How the model sees images.
        column: The column of ``sampling_int`` that has the number of a request's images.
        max_num_seqs: How many persistent rows there are.
        cache_bytes: See ``CACHE_BYTES``.

    Attributes:
        of_row: Returns the images of a row; None until it is set, like the next.
        token_ids: Returns the token ids of a row.
        num_computed: Images whose features were computed so far.
        tower_ns: Time that took of the last step that ``rows_of_step`` was asked for, in nanoseconds.
        looks_ahead: Of the last step that ``rows_of_step`` was asked for: the indices of tokens that see tokens behind
            them, int64 ``[n]``, and how many tokens of its sequence each sees, int32 ``[n]``; None: there are none.
    """

    def __init__(
        self,
        tower: VisionTower,
        vision: VisionConfig,
        column: int,
        max_num_seqs: int,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._positions = ImagePositions(max_num_seqs) if vision.kind == GRID else None
        self._tower, self._vision, self._column, self._cache_bytes = tower, vision, column, cache_bytes
        self.of_row: MultimodalOfRow | None = None
        self.token_ids: TokenIds | None = None
        self.num_computed = 0
        self.tower_ns = 0
        self.looks_ahead: tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]] | None = None
        self._images: dict[int, list[_Image]] = {}
        self._cache: OrderedDict[bytes, Tensor] = OrderedDict()
        self._num_cached_bytes = 0

    def update(self, output: SchedulerOutput, step: StepBuffers) -> None:
        """Apply the differences of a step: first rows that left, then rows that came."""
        for name, count in (("finished_rows", output.num_finished), ("preempted_rows", output.num_preempted)):
            if count:
                self._drop(step.int32(name, count))
        if output.num_new_reqs:
            rows = step.int32("new_rows", output.num_new_reqs)
            self._drop(rows)
            for row in rows[step.arrays["sampling_int"][: output.num_new_reqs, self._column] > 0].tolist():
                self._images[row] = self._read(row)

    def rows_of_step(self, output: SchedulerOutput, step: StepBuffers) -> tuple[Tensor, Tensor] | None:
        """Which tokens of a step stand for parts of images, and what they are.

        Returns:
            The tokens' indices in the step, int64 ``[n]``, and their embeddings, ``[n, hidden_size]``; None if there
            are none.

        Raises:
            SchedulerStateError: The step ends within an image whose tokens see each other.
        """
        self.looks_ahead, self.tower_ns = None, 0
        if not self._images:
            return None
        starts = step.int32("query_start_loc", output.num_reqs + 1)
        positions = step.arrays["positions"]
        places, features, counts = [], [], []
        for index, row in enumerate(step.int32("idx_mapping", output.num_reqs).tolist()):
            if (images := self._images.get(row)) is None:
                continue
            begin, end = int(starts[index]), int(starts[index + 1])
            first = int(positions[begin])
            for image in images:
                low, high = np.searchsorted(image.positions, (first, first + end - begin)).tolist()
                if low == high:
                    continue
                if image.features is None:
                    image.features, image.content = self._features(image), b""
                places.append(begin + image.positions[low:high] - first)
                features.append(image.features[low:high])
                if self._vision.attends_both_ways:
                    if high < image.positions.size:
                        raise SchedulerStateError(
                            f"a step ends at {first + end - begin}, within an image up to {image.positions[-1] + 1}, "
                            "whose tokens see each other"
                        )
                    counts.append(np.full(high - low, image.positions[-1] + 1, np.int32))
            if first + end - begin > images[-1].positions[-1]:
                del self._images[row]  # the prompt's images are computed; a preempted request comes back as a new row
        if not places:
            return None
        indices = np.concatenate(places)
        if counts:
            self.looks_ahead = indices, np.concatenate(counts)
        return torch.from_numpy(indices), torch.cat(features)

    def positions_of_step(self, output: SchedulerOutput, step: StepBuffers) -> Tensor | None:
        """The positions by which a step's tokens are rotated, where these are not their places in their sequences.

        Returns:
            int32 ``[num_tokens]``, or ``[3, num_tokens]`` if some have parts that differ; None if they are the places.
        """
        if self._positions is None:
            return None
        found = self._positions.of_step(
            step.int32("idx_mapping", output.num_reqs),
            step.int32("query_start_loc", output.num_reqs + 1),
            step.int32("positions", output.total_num_scheduled_tokens),
        )
        return None if found is None else torch.from_numpy(found)

    def _read(self, row: int) -> list[_Image]:
        if self.of_row is None or self.token_ids is None:
            raise RuntimeError("images need the content and the token ids of a request: call bind_token_ids first")
        ids = np.asarray(self.token_ids(row), np.int64)
        images, found = [], self.of_row(row)
        if self._positions is not None:
            self._positions.admit(row, [(offset, *self._grid(content, length)) for offset, length, _, content in found])
        for offset, length, digest, content in found:
            places = offset + np.flatnonzero(ids[offset : offset + length] == self._vision.image_token_id)
            if places.size:
                images.append(_Image(digest, content, places))
        return images

    def _features(self, image: _Image) -> Tensor:
        found = self._cache.pop(image.digest, None)
        if found is None:
            began_ns = monotonic_ns()
            found = self._tower(self._pixels(image.content))
            self.tower_ns += monotonic_ns() - began_ns
            self.num_computed += 1
            self._num_cached_bytes += found.nbytes
        self._cache[image.digest] = found  # the one used last
        while self._num_cached_bytes > self._cache_bytes and self._cache:
            _, dropped = self._cache.popitem(last=False)
            self._num_cached_bytes -= dropped.nbytes
        if found.shape[0] != image.positions.size:
            raise SchedulerStateError(
                f"an image has {found.shape[0]} features, but {image.positions.size} tokens of its prompt stand for it"
            )
        return found

    def _pixels(self, content: bytes) -> Tensor:
        shape, num_pixels = _shape(content)
        tiles, side = shape[0], self._vision.tile_size
        if self._vision.kind == GRID:
            fits = self._num_tiles(shape) is not None
        else:
            fits = shape[1:] == (CHANNELS, side, side) and 0 < tiles <= self._vision.max_tiles
        if not fits or num_pixels != math.prod(shape):
            raise SchedulerStateError(
                f"an image has {tiles} tiles of {list(shape[1:])} in {num_pixels} bytes; the model takes up to "
                f"{self._vision.max_tiles} of [3, {side}, {side}]"
            )
        pixels = np.frombuffer(content, np.uint8, offset=HEADER_BYTES)
        return torch.from_numpy(pixels.copy()).view(shape)

    def _num_tiles(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Rows and columns of a grid of tiles; None if the shape is none of a grid."""
        side = self._vision.tile_size
        (rows, rest), (columns, other_rest) = divmod(shape[2], side), divmod(shape[3], side)
        is_grid = shape[:2] == (1, CHANNELS) and not rest and not other_rest
        return (rows, columns) if is_grid and 0 < rows * columns <= self._vision.max_tiles else None

    def _grid(self, content: bytes, length: int) -> tuple[int, int]:
        """Rows and columns of the tiles of an image that has so many tokens."""
        shape, _ = _shape(content)
        if (found := self._num_tiles(shape)) is None or math.prod(found) != length:
            raise SchedulerStateError(f"an image of {list(shape)} is not a grid of {length} tokens")
        return found

    def _drop(self, rows: npt.NDArray[np.int32]) -> None:
        if self._images:
            for row in rows.tolist():
                self._images.pop(row, None)
        if self._positions is not None:
            self._positions.drop(rows)


def _shape(content: bytes) -> tuple[tuple[int, ...], int]:
    """Tiles, channels, height and width of an image, and its bytes of pixels."""
    return (
        struct.unpack_from("<4I", content) if len(content) >= HEADER_BYTES else (0, 0, 0, 0),
        len(content) - HEADER_BYTES,
    )
