"""Positions of three parts against transformers' own, whatever part of a prompt a step has."""

import numpy as np
import pytest
import torch

from rustvllm.worker.image_positions import ImagePositions, prompt_positions

MARK, TEXT = 9, 1


@pytest.fixture(scope="module")
def reference():
    """transformers' function, with tiles of 2 x 2 patches; it reads nothing else of a model."""
    from types import SimpleNamespace

    from transformers import Qwen2_5_VLModel

    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    model = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    model.get_vision_position_ids = Qwen2_5_VLModel.get_vision_position_ids.__get__(model)
    return lambda *args: Qwen2_5_VLModel.get_rope_index(model, *args)


def prompt_of(grids, gaps):
    """Token ids with images between stretches of text, and where the images are."""
    ids, images = [TEXT] * gaps[0], []
    for (rows, columns), gap in zip(grids, gaps[1:], strict=True):
        images.append((len(ids), rows, columns))
        ids += [MARK] * (rows * columns) + [TEXT] * gap
    return ids, images


def expected_of(reference, ids, grids):
    ids = torch.tensor([ids])
    whole = torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in grids])
    positions, shift = reference(ids, (ids == MARK).int(), whole)
    return positions[:, 0].numpy(), int(shift)


CASES = [
    ([(2, 3)], [0, 0]),
    ([(2, 3)], [4, 5]),
    ([(1, 1)], [1, 3]),
    ([(1, 7)], [2, 3]),
    ([(5, 4), (1, 6), (7, 2)], [3, 1, 2, 9]),
]


@pytest.mark.parametrize(("grids", "gaps"), CASES)
def test_prompts(reference, grids, gaps):
    ids, images = prompt_of(grids, gaps)
    positions, shift = expected_of(reference, ids, grids)
    found, found_shift = prompt_positions(images)
    last = images[-1][0] + grids[-1][0] * grids[-1][1]
    assert found.shape == (3, last)
    assert np.array_equal(found, positions[:, :last])
    assert found_shift == shift


@pytest.mark.parametrize("piece", [1, 2, 5, 64])
def test_steps_of_pieces(reference, piece):
    """Requests with and without images, in steps that end within images, and then tokens of the output."""
    rows = [3, 0, 2]
    prompts = {3: CASES[4], 2: CASES[1], 0: None}
    positions = ImagePositions(4)
    ids, expected, places = {}, {}, dict.fromkeys(rows, 0)
    for row in rows:
        if prompts[row] is None:
            ids[row], expected[row] = [TEXT] * 30, np.tile(np.arange(200), (3, 1))
            continue
        ids[row], images = prompt_of(*prompts[row])
        known, shift = expected_of(reference, ids[row], prompts[row][0])
        after = np.arange(len(ids[row]), 200) + shift
        expected[row] = np.concatenate([known, np.tile(after, (3, 1))], axis=1)
        positions.admit(row, images)
    had_parts = had_one = False
    while min(places.values()) < 70:
        counts = [min(piece, max(1, len(ids[row]) - places[row])) for row in rows]
        starts = np.cumsum([0, *counts]).astype(np.int32)
        at = np.concatenate([places[row] + np.arange(count) for row, count in zip(rows, counts, strict=True)])
        found = positions.of_step(np.array(rows, np.int32), starts, at.astype(np.int32))
        had_parts, had_one = had_parts or found.ndim == 2, had_one or found.ndim == 1
        wanted = [expected[row][:, places[row] :][:, :count] for row, count in zip(rows, counts, strict=True)]
        assert found.dtype == np.int32
        assert np.array_equal(np.broadcast_to(found, (3, starts[-1])), np.concatenate(wanted, axis=1))
        for row, count in zip(rows, counts, strict=True):
            places[row] += count
    assert had_parts
    assert had_one
    assert not positions._prompts, "positions of computed prompts are kept"


def test_rows_without_images_cost_nothing():
    positions = ImagePositions(4)
    rows, starts, places = (np.array(each, np.int32) for each in ([1], [0, 2], [7, 8]))
    assert positions.of_step(rows, starts, places) is None
    positions.admit(1, [(0, 2, 3)])
    assert positions.of_step(rows, starts, places).tolist() == [4, 5], "a prefix hit beyond the image"
    positions.drop(np.array([1, 3], np.int32))
    assert positions.of_step(rows, starts, places) is None
    positions.admit(1, [(0, 2, 3)])
    positions.drop(np.array([0], np.int32))
    assert positions.of_step(rows, starts, places) is not None
