"""Images as a model sees them: resized and cut into tiles, as transformers' processors do with Pillow.

transformers' own processors would do the same, but importing them brings torch into every process that serves HTTP.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rustvllm.config.vision import CHANNELS, FRAMED, GRID, SINGLE, VisionConfig
from rustvllm.images.grids import grid_of

if TYPE_CHECKING:
    from PIL.Image import Image

_MAX_SIDE = 4096
"""Idefics3 resizes no side to more."""


@dataclass(frozen=True, slots=True)
class ImageTiles:
    """An image, ready for the engine.

    Attributes:
        content: A header of four numbers, then the pixels of all tiles: uint8 ``[tiles, channels, height, width]``. The
            tiles of a grid are together, as one image: ``[1, channels, height, width]``.
        digest: Names the content, in 16 bytes.
        rows: Of tiles; 0 if the image was not cut.
        columns: Likewise.
    """

    content: bytes
    digest: bytes
    rows: int
    columns: int


def make_tiles(image: Image, vision: VisionConfig) -> ImageTiles:
    """Turn an image in RGB into tiles.

    Args:
        image: Decoded.
        vision: How the model sees images.
    """
    if vision.kind == GRID:
        rows, columns = grid_of(image.width, image.height, vision)
        tiles = [image.resize((columns * vision.tile_size, rows * vision.tile_size), vision.resample)]
    elif vision.kind in (SINGLE, FRAMED):
        tiles, rows, columns = [_single(image, vision)], 0, 0
    else:
        tiles, rows, columns = _tiled(image, vision)
    pixels: npt.NDArray[np.uint8] = np.empty((len(tiles), CHANNELS, tiles[0].height, tiles[0].width), np.uint8)
    for place, tile in zip(pixels, tiles, strict=True):
        place[...] = np.asarray(tile).transpose(2, 0, 1)
    content = b"".join((struct.pack("<4I", *pixels.shape), pixels.data.cast("B")))
    return ImageTiles(content, hashlib.blake2b(content, digest_size=16).digest(), rows, columns)


def _single(image: Image, vision: VisionConfig) -> Image:
    side = vision.tile_size
    if vision.shortest_edge is None:
        return image.resize((side, side), vision.resample)
    width, height = image.size
    shortest = vision.shortest_edge
    # The longer side is cut to the middle afterwards, so no more of it is resized than that needs: an image of one
    # row and thousands of columns would become gigabytes.
    longest = int(shortest * max(width, height) / min(width, height))
    size = (shortest, longest) if width <= height else (longest, shortest)
    left, top = (size[0] - side) // 2, (size[1] - side) // 2
    if longest <= _MAX_SIDE:
        return image.resize(size, vision.resample).crop((left, top, left + side, top + side))
    scale = (width / size[0], height / size[1])
    box = (left * scale[0], top * scale[1], (left + side) * scale[0], (top + side) * scale[1])
    return image.resize((side, side), vision.resample, box=box)


def _tiled(image: Image, vision: VisionConfig) -> tuple[list[Image], int, int]:
    side = vision.tile_size
    image = image.resize(_longest_resized(image.width, image.height, vision.longest_edge), vision.resample)
    if not vision.splits:
        return [image.resize((side, side), vision.resample)], 0, 0
    image = image.resize(_whole_tiles(image.width, image.height, side), vision.resample)
    columns, rows = image.width // side, image.height // side
    if rows <= 1 and columns <= 1:
        return [image], 0, 0
    corners = ((column * side, row * side) for row in range(rows) for column in range(columns))
    tiles = [image.crop((left, top, left + side, top + side)) for left, top in corners]
    return [*tiles, image.resize((side, side), vision.resample)], rows, columns


def _longest_resized(width: int, height: int, longest: int) -> tuple[int, int]:
    """The size whose longer side is ``longest``, and whose other side is even."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    return max(width, 1), max(height, 1)


def _whole_tiles(width: int, height: int, side: int) -> tuple[int, int]:
    """The size rounded up to whole tiles, first the longer side, then the other in proportion."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        height = math.ceil(int(width / ratio) / side) * side
    else:
        height = math.ceil(height / side) * side
        width = math.ceil(int(height * ratio) / side) * side
    return max(width, side), max(height, side)
