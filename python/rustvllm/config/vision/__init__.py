"""``VisionConfig``: which images a model takes and how they become pixels.

Plain data: processes that serve HTTP read it, and so does the worker. ``folder`` reads it from the model's folder,
``flags`` reads what the command line says of images, and ``combinations`` says what it cannot be combined with.
"""

import math
from dataclasses import dataclass, replace
from typing import Final, Self

from rustvllm.config.ranges import require_int
from rustvllm.exceptions import ConfigError

MAX_CONTENT_BYTES: Final = 256 << 20
"""Most bytes of pixels that the images of one request may take."""
DEFAULT_MAX_IMAGES: Final = 4
HEADER_BYTES: Final = 16
"""Of an image on its way to the worker: four numbers of 32 bits, tiles, channels, height and width."""
CHANNELS: Final = 3
SINGLE, TILED, GRID, FRAMED = "single", "tiled", "grid", "framed"
MAX_ASPECT_RATIO: Final = 200
"""``grid``: how many times as long as the other a side may be; transformers has the same limit."""
KINDS: Final = (SINGLE, TILED, GRID, FRAMED)
HALVES: Final = (0.5, 0.5, 0.5)
"""The mean and the standard deviation of each channel where the folder names none."""
BICUBIC: Final = 3
"""Pillow's number of the filter, as the files have it."""


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """How a model sees an image: as one tile, as several and the whole of it once more, or as a grid of small ones.

    The text of a model of kind ``framed`` is also served where images cannot be.

    Attributes:
        kind: ``single``: an image is one tile. ``tiled``: a large image is cut into tiles, and the whole image follows
            as a last tile. ``grid``: an image of any shape is a grid of small tiles of one token each, and a token's
            position in the prompt says where in the grid it is. ``framed``: an image is one tile, whose tokens stand
            between two others and see each other, whatever their order.
        image_token_id: The id that stands for a part of an image in a prompt.
        tokens_per_tile: How many such ids a tile has.
        tile_size: Pixels of a tile's sides.
        shortest_edge: ``single``: what the shorter side is resized to, before the middle is cut out; None: the image is
            resized to a tile, whatever its shape.
        longest_edge: ``tiled``: what the longer side is resized to before the image is cut.
        splits: ``tiled``: False makes every image one tile.
        min_pixels: ``grid``: a smaller image is enlarged to so many pixels.
        max_pixels: ``grid``: a larger image is reduced to so many.
        patch_size: ``grid``: pixels of the sides of what the vision tower sees first; a tile is several of them.
        frames: ``grid``: how many frames of a video such a patch has; an image is repeated as often.
        max_tokens: ``grid``: most tokens of an image, less than the longest sequence; None: any number.
        around_ids: The ids before and after an image, which chat templates write; empty: none. ``framed``: a prompt
            has the first one in place of an image.
        resample: Pillow's number of the filter.
        rescale_factor: Pixels are multiplied by it.
        image_mean: Subtracted from each channel after that.
        image_std: Each channel is divided by it after that.
        max_images: Most images of a prompt.
    """

    kind: str
    image_token_id: int
    tokens_per_tile: int
    tile_size: int
    shortest_edge: int | None = None
    longest_edge: int = 0
    splits: bool = False
    min_pixels: int = 1
    max_pixels: int = 1
    patch_size: int = 0
    frames: int = 1
    max_tokens: int | None = None
    around_ids: tuple[int, ...] = ()
    resample: int = BICUBIC
    rescale_factor: float = 1 / 255
    image_mean: tuple[float, ...] = HALVES
    image_std: tuple[float, ...] = HALVES
    max_images: int = DEFAULT_MAX_IMAGES

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        require_int("max_images", self.max_images, 0)
        if self.max_content_bytes > MAX_CONTENT_BYTES:
            most = MAX_CONTENT_BYTES // self.max_image_bytes
            raise ConfigError(
                f"limit_mm_per_prompt allows {self.max_images} images of up to {self.max_image_bytes} bytes, but a "
                f"request may have {MAX_CONTENT_BYTES} bytes of pixels: allow at most {most} images"
            )

    def for_length(self, max_model_len: int | None) -> Self:
        """The same for sequences of at most so many tokens: an image has fewer."""
        if self.kind != GRID or max_model_len is None:
            return self
        return replace(self, max_tokens=most_tokens(max_model_len))

    @property
    def attends_both_ways(self) -> bool:
        """Whether a token of an image sees those behind it, so that all are computed in one step."""
        return self.kind == FRAMED

    @property
    def placeholder_id(self) -> int:
        """What stands for an image in a prompt."""
        return self.around_ids[0] if self.kind == FRAMED else self.image_token_id

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """What stands for an image in a message that is one text."""
        if self.kind == FRAMED:
            return (self.placeholder_id,)
        return (*self.around_ids[:1], self.image_token_id, *self.around_ids[1:])

    @property
    def max_tiles(self) -> int:
        """Most tiles of an image."""
        if self.kind == GRID:
            area = self.tile_size**2
            # Sides are rounded up to whole tiles where an image is enlarged, and a short side is at least one tile.
            longest = math.isqrt(MAX_ASPECT_RATIO * self.max_pixels) // self.tile_size + 1
            enlarged = math.isqrt(MAX_ASPECT_RATIO * self.min_pixels) // self.tile_size + 1
            most = max(self.max_pixels // area, longest, self.min_pixels // area + 2 * enlarged + 1)
            return most if self.max_tokens is None else max(1, min(most, self.max_tokens))
        if self.kind != TILED or not self.splits:
            return 1
        longest = self.longest_edge + self.longest_edge % 2  # the other side is rounded up to an even number
        per_side = -(-longest // self.tile_size)
        return 1 if per_side <= 1 else per_side**2 + 1

    @property
    def max_image_bytes(self) -> int:
        """Most bytes of an image on its way to the worker."""
        return HEADER_BYTES + self.max_tiles * CHANNELS * self.tile_size**2

    @property
    def max_content_bytes(self) -> int:
        """Most bytes of all images of a request."""
        return self.max_images * self.max_image_bytes


def most_tokens(max_model_len: int | None) -> int | None:
    """Most tokens of an image in sequences of at most so many: one token is left for the output."""
    return None if max_model_len is None else max(1, max_model_len - 1)
