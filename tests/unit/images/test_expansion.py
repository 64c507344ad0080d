"""Placeholders become the tokens of images, and each image has its place."""

import pytest

from rustvllm import _core
from rustvllm.config.vision import FRAMED, GRID, SINGLE, VisionConfig
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


class LineBreaks:
    """A tokenizer: 20 and more are so many line breaks less 20, up to four in one, other ids are letters."""

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        count = len(text)
        assert text == "\n" * count
        return [24] * (count // 4) + ([20 + count % 4] if count % 4 else [])

    def decode(self, ids, *, skip_special_tokens):
        assert not skip_special_tokens
        return "".join("\n" * (token - 20) if token > 20 else chr(96 + token) for token in ids)

    def convert_ids_to_tokens(self, ids):
        return [f"<{token}>" for token in ids]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([1, 7, 2], [1, 22, 7, 9, 9, 8, 22, 2]),
        ([7], [22, 7, 9, 9, 8, 22]),
        ([1, 21, 7, 24, 2], [1, 23, 7, 9, 9, 8, 24, 22, 2]),
        ([21, 1, 21, 7, 21, 2, 21], [21, 1, 23, 7, 9, 9, 8, 23, 2, 21]),
        ([23, 22, 7], [24, 23, 7, 9, 9, 8, 22]),
        ([7, 7], [22, 7, 9, 9, 8, 24, 7, 9, 9, 8, 22]),
        ([7, 21, 7], [22, 7, 9, 9, 8, 24, 21, 7, 9, 9, 8, 22]),
        ([7, 21, 1, 7, 3], [22, 7, 9, 9, 8, 23, 1, 22, 7, 9, 9, 8, 22, 3]),
        ([9, 7, 8, 9], [9, 22, 7, 9, 9, 8, 22, 8, 9]),
        ([1, 2], [1, 2]),
    ],
)
def test_blank_lines_around_images(ids, expected):
    """Those of the prompt that they meet become one token with them; marks that a user typed stay."""
    vision = VisionConfig(kind=FRAMED, image_token_id=9, tokens_per_tile=2, tile_size=4, around_ids=(7, 8))
    images = [CAT, DOG][: ids.count(7)]
    found, spans = ImageTokens(vision, LineBreaks(), "model").expand(_core.TokenIds(ids), images)
    assert found.tolist() == expected
    assert len(spans) == len(images)
    for (offset, length, digest, content), image in zip(spans, images, strict=True):
        assert expected[offset - 1 : offset + length + 1] == [7, 9, 9, 8]
        assert (digest, content) == (image.digest, image.content)
    if images:
        with pytest.raises(InvalidRequestError, match="need its tokenizer"):
            ImageTokens(vision, None, "model").expand(_core.TokenIds(ids), images)
    with pytest.raises(InvalidRequestError, match=rf"has {ids.count(7)} image placeholders \(<7>, id 7\)"):
        ImageTokens(vision, LineBreaks(), "model").check_count(_core.TokenIds(ids), 3)
