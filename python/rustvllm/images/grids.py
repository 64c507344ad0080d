"""The grid of tiles that an image becomes where a model sees images of any shape (Qwen-VL's ``smart_resize``)."""

from __future__ import annotations

import math

from rustvllm.config.vision import GRID, MAX_ASPECT_RATIO, VisionConfig
from rustvllm.exceptions import InvalidRequestError


def grid_of(width: int, height: int, vision: VisionConfig) -> tuple[int, int]:
    """The rows and columns of tiles of an image, which is resized to fill them.

    Both sides become whole tiles, and the proportions stay nearly the same; the image has from ``min_pixels`` to
    ``max_pixels`` pixels if whole tiles allow it.

    Args:
        width: Pixels of the image.
        height: Likewise.
        vision: How the model sees images.
    """
    tile, area = vision.tile_size, width * height
    rows, columns = round(height / tile), round(width / tile)
    pixels = rows * columns * tile**2
    if pixels > vision.max_pixels:
        scale = math.sqrt(area / vision.max_pixels)
        return max(1, math.floor(height / scale / tile)), max(1, math.floor(width / scale / tile))
    if pixels < vision.min_pixels:
        scale = math.sqrt(vision.min_pixels / area)
        return math.ceil(height * scale / tile), math.ceil(width * scale / tile)
    return rows, columns


def check_grid(width: int, height: int, vision: VisionConfig, where: str) -> None:
    """Refuse an image of a shape that the model does not take, or of more tokens than a prompt may have.

    Images that are not cut into a grid have a limited size in any case.

    Args:
        width: Pixels of the image, which need not be decoded yet.
        height: Likewise.
        vision: How the model sees images.
        where: Names the image in messages.

    Raises:
        InvalidRequestError: Names the size and the limit.
    """
    if vision.kind != GRID:
        return
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise InvalidRequestError(
            f"{where} has {width} x {height} pixels; the longer side may be at most {MAX_ASPECT_RATIO} times the "
            "other: send a part of the image",
            "image_url",
        )
    rows, columns = grid_of(width, height, vision)
    if vision.max_tokens is not None and rows * columns > vision.max_tokens:
        raise InvalidRequestError(
            f"{where} has {width} x {height} pixels, which become {rows * columns} tokens, but the maximum context "
            f"length is {vision.max_tokens + 1} tokens: send a smaller image, or raise max_model_len",
            "image_url",
        )
