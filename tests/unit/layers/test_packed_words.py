"""Whole numbers out of words of 32 bits, as other tools store them: packed as the same numbers are, one by one."""

import numpy as np
import pytest

from rustvllm import _core

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def words_of(numbers, layout, bits):
    """Words that hold numbers uint8 ``[outputs, inputs]``."""
    per = 32 // bits
    if layout == "awq":
        eights = numbers.T.reshape(numbers.shape[1], -1, 8)[:, :, AWQ_ORDER]
    elif layout == "gptq":
        eights = numbers.reshape(numbers.shape[0], -1, per).transpose(1, 0, 2)
    else:
        padded = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % per)))
        eights = padded.reshape(numbers.shape[0], -1, per)
    shifts = np.arange(per, dtype=np.uint64) * bits
    return np.ascontiguousarray((eights.astype(np.uint64) << shifts).sum(-1).astype(np.uint32)).view(np.int32)


def unpacked(packed):
    rows = np.empty((packed.out_features, packed.in_features), np.float32)
    packed.unpack_rows(np.arange(packed.out_features), rows)
    return rows


@pytest.mark.parametrize("has_order", [False, True])
@pytest.mark.parametrize("zeros", ["middle", "point"])
@pytest.mark.parametrize(
    ("layout", "bits", "kind"), [("awq", 4, "w4a8"), ("gptq", 4, "w4a8"), ("packed", 4, "int4"), ("gptq", 8, "w8a8")]
)
@pytest.mark.parametrize(("outputs", "inputs"), [(104, 128), (8, 256), (40, 96)])
def test_words_hold_what_their_numbers_are(layout, bits, kind, zeros, has_order, outputs, inputs):
    if bits == 8 and zeros == "point":
        zeros = "middle"
    generator = np.random.default_rng(outputs + inputs + bits)
    numbers = generator.integers(0, 1 << bits, (outputs, inputs), np.uint8)
    scales = generator.standard_normal((outputs, inputs // 32)).astype(np.float16).astype(np.float32)
    points = generator.integers(0, 16, scales.shape).astype(np.float32) if zeros == "point" else None
    order = generator.permutation(inputs).astype(np.uint32) if has_order else None
    less = 0 if zeros == "point" else 1 << (bits - 1)
    found, expected = (
        _core.PackedLinear(_core.CpuThreads(2), outputs, inputs, kind, 32, zeros=zeros) for _ in range(2)
    )
    found.pack_words(0, words_of(numbers, layout, bits), layout, bits, less, scales, points, order)
    ordered = np.ascontiguousarray(numbers if order is None else numbers[:, order])
    expected.pack_whole(0, (ordered.astype(np.int16) - less).astype(np.int8), scales, points)
    assert np.array_equal(unpacked(found), unpacked(expected))
    values = ordered.astype(np.float32).reshape(outputs, -1, 32)
    zero = less if points is None else points[:, :, None]
    plain = ((values - zero) * scales[:, :, None]).reshape(outputs, inputs)
    np.testing.assert_allclose(unpacked(found), plain, rtol=1e-5, atol=1e-5)


def test_rows_that_are_not_whole_words_and_parts_of_a_layer():
    numbers = np.arange(48 * 100, dtype=np.int64).astype(np.uint8).reshape(48, 100) % 16
    packed = _core.PackedLinear(_core.CpuThreads(1), 96, 100, "int4", 128)
    scales = np.ones((48, 1), np.float32)
    for first in (48, 0):
        packed.pack_words(first, words_of(numbers, "packed", 4), "packed", 4, 8, scales)
    assert np.array_equal(unpacked(packed), np.tile(numbers.astype(np.float32) - 8, (2, 1)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "gemv"}, 'there is no layout "gemv" of words with numbers of 4 bits'),
        ({"layout": "awq", "bits": 8}, 'there is no layout "awq" of words with numbers of 8 bits'),
        ({"words": np.zeros((63, 4), np.int32)}, r"words \(63, 4\) do not hold rows of 64 inputs"),
        ({"words": np.zeros((64, 5), np.int32)}, r"scales has the shape \(32, 2\), but \(40, 2\) is needed"),
        ({"words": np.zeros((64, 8), np.int32)[:, ::2]}, "strides"),
        ({"words": np.zeros((64, 8), np.int32)[:, :4]}, "must follow each other without a gap"),
        ({"words": np.zeros((64, 4), np.uint8)}, "words must be an array of int32"),
        ({"order": np.full(64, 64, np.uint32)}, "the order of inputs does not name 64 of them"),
        ({"order": np.arange(63, dtype=np.uint32)}, "the order of inputs does not name 64 of them"),
        ({"first_row": 1}, "rows 1 to 33"),
        ({"scales": np.full((32, 2), np.inf, np.float32)}, "scale"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, message):
    packed = _core.PackedLinear(_core.CpuThreads(1), 32, 64, "w4a8", 32)
    good = {
        "first_row": 0,
        "words": np.zeros((64, 4), np.int32),
        "layout": "awq",
        "bits": 4,
        "less": 8,
        "scales": np.ones((32, 2), np.float32),
    }
    with pytest.raises((ValueError, TypeError), match=message):
        packed.pack_words(**(good | change))
    packed.pack_words(**good)
    assert not np.any(unpacked(packed) + 8)
