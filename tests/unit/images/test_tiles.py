"""Tiles of images, against transformers' processors with Pillow: every pixel."""

import struct

import numpy as np
import pytest

from rustvllm.config.vision import SINGLE, TILED, VisionConfig
from rustvllm.images.tiles import make_tiles

Image = pytest.importorskip("PIL.Image", reason="images need Pillow (the extra rustvllm[vision])")
SIZES = [(1, 1), (2, 3), (28, 28), (29, 28), (31, 97), (97, 31), (64, 64), (65, 33), (200, 150), (7, 300), (300, 2)]


def picture(size, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(pixels)


def pixels_of(tiles):
    shape = struct.unpack_from("<4I", tiles.content)
    return np.frombuffer(tiles.content, np.uint8, offset=16).reshape(shape)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shortest", [28, 33, None])
def test_one_tile(size, shortest):
    import transformers

    vision = VisionConfig(kind=SINGLE, image_token_id=1, tokens_per_tile=4, tile_size=28, shortest_edge=shortest)
    options = {"size": {"height": 28, "width": 28}, "do_center_crop": False}
    if shortest is not None:
        options = {"size": {"shortest_edge": shortest}, "crop_size": {"height": 28, "width": 28}}
    processor = transformers.CLIPImageProcessorPil(do_rescale=False, do_normalize=False, resample=3, **options)
    image = picture(size)
    found = make_tiles(image, vision)
    assert np.array_equal(pixels_of(found), np.stack(processor(image)["pixel_values"]))
    assert (found.rows, found.columns) == (0, 0)
    assert len(found.content) <= vision.max_image_bytes


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("longest", [32, 64, 77, 128])
@pytest.mark.parametrize("size", SIZES)
def test_many_tiles(size, longest, splits):
    import transformers

    vision = VisionConfig(
        kind=TILED, image_token_id=1, tokens_per_tile=4, tile_size=32, longest_edge=longest, splits=splits, resample=1
    )
    processor = transformers.SmolVLMImageProcessorPil(
        do_rescale=False, do_normalize=False, do_pad=False, size={"longest_edge": longest}, do_image_splitting=splits,
        max_image_size={"longest_edge": 32}, return_row_col_info=True, resample=1,
    )  # fmt: skip
    image = picture(size)
    found, expected = make_tiles(image, vision), processor(image)
    assert np.array_equal(pixels_of(found), np.stack(expected["pixel_values"][0]))
    assert [found.rows, found.columns] == [expected["rows"][0][0], expected["cols"][0][0]]
    assert len(found.content) <= vision.max_image_bytes


def test_a_strip_becomes_no_larger_than_it_must():
    """transformers would make 300 MB of it before it cuts the middle out."""
    vision = VisionConfig(kind=SINGLE, image_token_id=1, tokens_per_tile=4, tile_size=28, shortest_edge=28)
    for size in ((60_000, 3), (3, 60_000)):
        image = Image.new("RGB", size, "red")
        image.paste("blue", (size[0] // 2 - 1, size[1] // 2 - 1, size[0] // 2 + 1, size[1] // 2 + 1))
        pixels = pixels_of(make_tiles(image, vision))[0]
        assert pixels.shape == (3, 28, 28)
        assert pixels[2].max() > 200, "the middle is not in the middle"


def test_digests_name_the_pixels():
    vision = VisionConfig(kind=TILED, image_token_id=1, tokens_per_tile=4, tile_size=8, longest_edge=16, splits=True)
    one, same, other = (make_tiles(picture((16, 9), seed), vision) for seed in (1, 1, 2))
    assert (one.digest == same.digest, one.digest == other.digest, len(one.digest)) == (True, False, 16)
