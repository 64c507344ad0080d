"""Blocks of every type against the gguf package, bit for bit, on random bytes."""

import numpy as np
import pytest

from rustvllm import _core

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")

TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]
WHOLE = {"Q8_0": 32, "Q4_0": 32, "Q5_0": 32, "Q6_K": 16}
SIZES = {name: (block, num_bytes) for name, block, num_bytes in _core.gguf_type_sizes()}


def random_blocks(name, num_blocks, seed=0):
    return np.random.default_rng(seed).integers(0, 256, num_blocks * SIZES[name][1], np.uint8)


def expected(name, blocks):
    kind = gguf.GGMLQuantizationType[name]
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(blocks.reshape(-1, SIZES[name][1]), kind).reshape(-1)


def assert_same_bits(ours, theirs):
    nans = np.isnan(theirs)  # which one says nothing
    assert np.array_equal(np.isnan(ours), nans)
    assert np.array_equal(ours[~nans].view(np.uint32), theirs[~nans].astype(np.float32).view(np.uint32))


def test_sizes_are_those_of_the_package():
    theirs = {kind.name: size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert set(TYPES) <= set(SIZES)
    assert {name: theirs[name] for name in SIZES} == SIZES


@pytest.mark.parametrize("name", TYPES)
def test_random_blocks_have_the_same_bits(name):
    # As many numbers that several threads share them.
    num_blocks = (1 << 20) // SIZES[name][0] + 7
    blocks = random_blocks(name, num_blocks)
    out = np.empty(num_blocks * SIZES[name][0], np.float32)
    _core.unpack_blocks(name, blocks, out)
    assert_same_bits(out, expected(name, blocks))


@pytest.mark.parametrize("group_size", [16, 32])
@pytest.mark.parametrize("name", WHOLE)
def test_packed_layers_hold_the_same_numbers(name, group_size):
    rows, columns = 37, 512
    row_bytes = columns // SIZES[name][0] * SIZES[name][1]
    blocks = random_blocks(name, rows * columns // SIZES[name][0]).reshape(-1, SIZES[name][1])
    at = 208 if name == "Q6_K" else 0
    blocks[:, at + 1] &= 0x3B  # scales that are finite
    packed = _core.PackedLinear(_core.CpuThreads(2), rows, columns, "int8", group_size)
    if group_size > WHOLE[name]:
        with pytest.raises(ValueError, match="groups of 32 with 16 scales are asked for of 512 numbers of Q6_K"):
            packed.pack_blocks(0, name, blocks.reshape(rows, row_bytes))
        return
    packed.pack_blocks(5, name, blocks.reshape(rows, row_bytes)[5:])
    packed.pack_blocks(0, name, blocks.reshape(rows, row_bytes)[:5])
    out = np.empty(columns, np.float32)
    whole = expected(name, blocks).reshape(rows, columns)
    assert np.abs(whole).max() > 0
    for row in range(rows):
        packed.unpack_row(row, out)
        assert np.array_equal(out, whole[row])


FORMS = {
    # type -> how it is packed: kind, group, scales, zeros
    "Q4_0": ("int4", 32, "f16", "middle"),
    "Q4_1": ("int4", 32, "f16", "minimum"),
    "Q4_K": ("int4", 32, "two-level", "minimum"),
    "Q5_1": ("int8", 32, "f16", "minimum"),
    "Q5_K": ("int8", 32, "two-level", "minimum"),
}


WIDE = ("int8", 16, "f32", "minimum")
CASES = [*FORMS.items(), *((name, WIDE) for name in (*FORMS, "Q6_K", "Q8_0"))]


@pytest.mark.parametrize(("name", "form"), CASES, ids=str)
def test_packed_layers_with_minima_hold_the_same_numbers(name, form):
    kind, group_size, scales, zeros = form
    rows, columns = 37, 512
    blocks = random_blocks(name, rows * columns // SIZES[name][0]).reshape(-1, SIZES[name][1])
    for at in {"Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,)}.get(name, (0, 2)):
        blocks[:, at + 1] &= 0x3B  # scales and minima that are finite
    packed = _core.PackedLinear(_core.CpuThreads(2), rows, columns, kind, group_size, scales=scales, zeros=zeros)
    given = blocks.reshape(rows, columns // SIZES[name][0] * SIZES[name][1])
    packed.pack_blocks(5, name, given[5:])
    packed.pack_blocks(0, name, given[:5])
    out = np.empty(columns, np.float32)
    whole = expected(name, blocks).reshape(rows, columns)
    assert np.abs(whole).max() > 0
    for row in range(rows):
        packed.unpack_row(row, out)
        assert np.array_equal(out, whole[row])


def test_packing_refuses_what_does_not_fit():
    packed = _core.PackedLinear(_core.CpuThreads(1), 2, 64, "int8", 32)
    blocks = random_blocks("Q8_0", 4).reshape(2, -1)
    blocks[:, 1] = blocks[:, 35] = 0x3C
    with pytest.raises(ValueError, match="rows 1 to 3"):
        packed.pack_blocks(1, "Q8_0", blocks)
    with pytest.raises(ValueError, match="Q4_1 are not unpacked here"):
        packed.pack_blocks(0, "Q4_1", np.zeros((2, 40), np.uint8))
    with pytest.raises(ValueError, match='no type of GGUF tensors called "Q9"'):
        packed.pack_blocks(0, "Q9", blocks)
    with pytest.raises(ValueError, match="has the shape"):
        packed.pack_blocks(0, "Q8_0", blocks[:, :-1].copy())
    with pytest.raises(ValueError, match="kept as F32 and not as int8"):
        _core.PackedLinear(_core.CpuThreads(1), 2, 64, "f32").pack_blocks(0, "Q8_0", blocks)
    broken = blocks.copy()
    broken[1, :2] = (0, 0x7C)  # infinity
    with pytest.raises(ValueError, match="row 1 of the weight has an element that is not finite"):
        packed.pack_blocks(0, "Q8_0", broken)
    with pytest.raises(ValueError, match="have not been packed"):
        packed.forward(np.zeros((1, 64), np.float32), np.zeros((1, 2), np.float32))
    packed.pack_blocks(0, "Q8_0", blocks)
    packed.forward(np.zeros((1, 64), np.float32), np.zeros((1, 2), np.float32))


def test_unpacking_refuses_what_does_not_fit():
    out = np.empty(64, np.float32)
    with pytest.raises(ValueError, match="67 bytes of Q8_0 are given for 64 numbers, but as many take 68"):
        _core.unpack_blocks("Q8_0", np.zeros(67, np.uint8), out)
    with pytest.raises(ValueError, match="IQ4_NL are not unpacked here"):
        _core.unpack_blocks("IQ4_NL", np.zeros(36, np.uint8), out)
    with pytest.raises(TypeError, match="blocks must be an array of uint8"):
        _core.unpack_blocks("Q8_0", np.zeros(68, np.int32), out)
    with pytest.raises(ValueError, match="contiguous"):
        _core.unpack_blocks("Q8_0", np.zeros(136, np.uint8)[::2], out)
    with pytest.raises(ValueError, match="share memory"):
        _core.unpack_blocks("F32", out.view(np.uint8), out)
