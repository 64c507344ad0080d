"""Placeholders become the tokens of images, and each image has its place."""

import pytest

from rustvllm import _core
from rustvllm.config.vision import GRID, SINGLE, VisionConfig
from rustvllm.exceptions import InvalidRequestError
from rustvllm.images.expansion import ImageTokens
from rustvllm.images.tiles import ImageTiles

VISION = VisionConfig(kind=SINGLE, image_token_id=9, tokens_per_tile=3, tile_size=4)
CAT, DOG = ImageTiles(b"cat", b"c" * 16, 0, 0), ImageTiles(b"dog", b"d" * 16, 0, 0)


@pytest.mark.parametrize(
    ("ids", "images", "expected", "offsets"),
    [
        ([1, 9, 2], [CAT], [1, 9, 9, 9, 2], [1]),
        ([9], [CAT], [9, 9, 9], [0]),
        ([9, 9], [CAT, DOG], [9] * 6, [0, 3]),
        ([9, 1, 9, 2], [CAT, DOG], [9, 9, 9, 1, 9, 9, 9, 2], [0, 4]),
    ],
)
def test_places(ids, images, expected, offsets):
    found, spans = ImageTokens(VISION, None, "model").expand(_core.TokenIds(ids), images)
    assert found.tolist() == expected
    assert spans == [(at, 3, image.digest, image.content) for at, image in zip(offsets, images, strict=True)]


@pytest.mark.parametrize(("ids", "count"), [([1, 2], 1), ([9], 2), ([9, 9, 9], 1)])
def test_another_number_of_placeholders(ids, count):
    with pytest.raises(InvalidRequestError, match=f"has {ids.count(9)} image placeholders .id 9., .* {count} images"):
        ImageTokens(VISION, None, "model").expand(_core.TokenIds(ids), [CAT] * count)


def test_grids():
    vision = VisionConfig(kind=GRID, image_token_id=9, tokens_per_tile=1, tile_size=4)
    images = [ImageTiles(b"cat", b"c" * 16, 2, 3), ImageTiles(b"dog", b"d" * 16, 1, 1)]
    found, spans = ImageTokens(vision, None, "model").expand(_core.TokenIds([1, 9, 2, 9]), images)
    assert found.tolist() == [1, *[9] * 6, 2, 9]
    assert [span[:2] for span in spans] == [(1, 6), (8, 1)]
