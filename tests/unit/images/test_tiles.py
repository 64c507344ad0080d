"""Tiles of images, against transformers' processors with Pillow: every pixel."""

import struct

import numpy as np
import pytest

from rustvllm.config.vision import GRID, SINGLE, TILED, VisionConfig
from rustvllm.exceptions import InvalidRequestError
from rustvllm.images.grids import check_grid, grid_of
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


def grid_vision(**changes):
    fields = {"tile_size": 8, "patch_size": 4, "min_pixels": 640, "max_pixels": 3200, "frames": 2}
    return VisionConfig(kind=GRID, image_token_id=1, tokens_per_tile=1, **(fields | changes))


@pytest.mark.parametrize("limits", [(640, 3200), (1, 64), (1, 12_845_056), (5000, 5000), (3136, 3200)])
@pytest.mark.parametrize("size", SIZES)
def test_a_grid_of_tiles(size, limits):
    """Against transformers: the size, and each patch once the pixels are normalized."""
    import torch
    import transformers

    from rustvllm.models.vision.tower import patches_of

    vision = grid_vision(min_pixels=limits[0], max_pixels=limits[1])
    processor = transformers.Qwen2VLImageProcessorPil(
        patch_size=4, size=dict(zip(("shortest_edge", "longest_edge"), limits, strict=True)),
        do_rescale=False, do_normalize=False,
    )  # fmt: skip
    image = picture(size)
    found, expected = make_tiles(image, vision), processor(image, return_tensors="pt")
    assert [1, 2 * found.rows, 2 * found.columns] == expected["image_grid_thw"][0].tolist()
    pixels = torch.from_numpy(pixels_of(found).copy())
    assert pixels.shape == (1, 3, found.rows * 8, found.columns * 8)
    assert torch.equal(patches_of(pixels[0].float(), vision), expected["pixel_values"])
    assert len(found.content) <= vision.max_image_bytes


def test_the_largest_grids():
    """No shape that is allowed has more tiles than the limit says."""
    sides = [1, 2, 3, 5, 8, 13, 40, 99, 200, 201, 1000, 8000, 39_999]
    for limits in ((1, 64), (64, 64), (640, 3200), (12_000, 12_800), (1, 1_000_000), (900_000, 1_000_000)):
        vision = grid_vision(min_pixels=limits[0], max_pixels=limits[1])
        shapes = [(w, h) for w in sides for h in sides if max(w, h) <= 200 * min(w, h)]
        counts = [rows * columns for rows, columns in (grid_of(w, h, vision) for w, h in shapes)]
        assert min(counts) > 0
        assert max(counts) <= vision.max_tiles


def test_grids_that_are_refused():
    with pytest.raises(InvalidRequestError, match="cat has 2010 x 10 pixels; the longer side may be at most 200 times"):
        check_grid(2010, 10, grid_vision(), "cat")
    check_grid(2000, 10, grid_vision(), "cat")
    match = "cat has 40 x 64 pixels, which become 40 tokens, but the maximum context length is 40 tokens: send a"
    with pytest.raises(InvalidRequestError, match=match):
        check_grid(40, 64, grid_vision().for_length(40), "cat")
    check_grid(40, 64, grid_vision().for_length(41), "cat")
    check_grid(1, 10_000, VisionConfig(kind=SINGLE, image_token_id=1, tokens_per_tile=4, tile_size=28), "cat")
