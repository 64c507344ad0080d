"""Blocks of every type against the gguf package, bit for bit, on random bytes."""

import numpy as np
import pytest

from rustvllm import _core
from rustvllm.layers.whole_rows import FileRows

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")

TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4"]
WHOLE = {"Q8_0": 32, "Q4_0": 32, "Q5_0": 32, "Q6_K": 16, "IQ4_NL": 32, "MXFP4": 32}
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
    if name != "MXFP4":
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
    "Q6_K": ("int6", 16, "two-level", "middle"),
}


WIDE = ("int8", 16, "f32", "minimum")
MIXED = ("int8", 16, "two-level", "minimum")
CASES = [
    *FORMS.items(),
    *((name, WIDE) for name in (*FORMS, "Q8_0")),
    *((name, MIXED) for name in ("Q4_K", "Q5_K", "Q6_K")),
]


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
    with pytest.raises(ValueError, match="IQ4_XS are not unpacked here"):
        _core.unpack_blocks("IQ4_XS", np.zeros(36, np.uint8), out)
    with pytest.raises(TypeError, match="blocks must be an array of uint8"):
        _core.unpack_blocks("Q8_0", np.zeros(68, np.int32), out)
    with pytest.raises(ValueError, match="contiguous"):
        _core.unpack_blocks("Q8_0", np.zeros(136, np.uint8)[::2], out)
    with pytest.raises(ValueError, match="share memory"):
        _core.unpack_blocks("F32", out.view(np.uint8), out)


@pytest.mark.parametrize("group_size", [16, 32])
@pytest.mark.parametrize("name", [name for name in TYPES if name not in ("F32", "F16", "BF16")])
def test_whole_numbers_scales_and_minima_mean_the_same_numbers(name, group_size):
    count = 37 * 512
    blocks = random_blocks(name, count // SIZES[name][0]).reshape(-1, SIZES[name][1])
    places = {"Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,), "IQ4_NL": (0,), "MXFP4": ()}
    for at in places.get(name, (0, 2)):
        blocks[:, at + 1] &= 0x3B  # scales and minima that are finite
    numbers = np.empty(count, np.int8)
    scales, minima = np.empty((2, count // group_size), np.float32)
    if group_size > WHOLE.get(name, 32):
        with pytest.raises(ValueError, match="groups of 32"):
            _core.whole_blocks(name, blocks.reshape(-1), numbers, scales, minima)
        return
    _core.whole_blocks(name, blocks.reshape(-1), numbers, scales, minima)
    with np.errstate(over="ignore"):  # the largest exponents of MXFP4 leave float32
        values = numbers.reshape(-1, group_size).astype(np.float32) * scales[:, None] - minima[:, None]
    assert np.abs(values).max() > 0
    assert np.array_equal(values.reshape(-1), expected(name, blocks))


def test_whole_blocks_refuses_what_does_not_fit():
    blocks, numbers = np.zeros(68, np.uint8), np.empty(64, np.int8)
    scales, minima = np.empty((2, 2), np.float32)
    for wrong, message in [
        ((blocks[:67], numbers, scales, minima), "67 bytes of Q8_0 are given for 64 numbers"),
        ((blocks[:0], numbers, scales, minima), "0 bytes, 2 minima and 2 scales"),
        ((blocks, numbers, scales, minima[:1]), "68 bytes, 1 minima and 2 scales"),
        ((blocks, numbers[:63], scales, minima), "2 scales cannot share 63 numbers"),
        ((blocks, numbers, scales[:0], minima), "0 scales cannot share 64 numbers"),
        ((blocks, numbers, scales, scales), "share memory"),
        ((blocks, numbers[::2], scales, minima), "contiguous"),
    ]:
        with pytest.raises(ValueError, match=message):
            _core.whole_blocks("Q8_0", *wrong)
    with pytest.raises(ValueError, match="F16 are not unpacked here"):
        _core.whole_blocks("F16", np.zeros(128, np.uint8), numbers, scales, minima)
    with pytest.raises(TypeError, match="numbers must be an array of int8"):
        _core.whole_blocks("Q8_0", blocks, np.empty(64, np.int32), scales, minima)


@pytest.mark.parametrize(("name", "interleaved"), [("Q8_0", 0), ("Q4_K", 16), ("Q6_K", 128), ("Q4_0", 2)])
def test_rows_out_of_a_file_are_those_out_of_memory(name, interleaved, tmp_path):
    rows, columns, ahead = 256, 512, 100
    kind, group, *form = FORMS.get(name, ("int8", 16 if name == "Q6_K" else 32, "f32", "middle"))
    blocks = random_blocks(name, rows * columns // SIZES[name][0]).reshape(-1, SIZES[name][1])
    for at in {"Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,)}.get(name, (0, 2)):
        blocks[:, at + 1] &= 0x3B  # scales and minima that are finite
    given = blocks.reshape(rows, -1)
    path = tmp_path / "rows"
    path.write_bytes(bytes(ahead) + given.tobytes())
    threads = _core.CpuThreads(2)
    from_file, from_memory = (
        _core.PackedLinear(threads, rows + 3, columns, kind, group, scales=form[0], zeros=form[1]) for _ in range(2)
    )
    half = rows // 2
    row_bytes = given.shape[1]
    for begin in (half, 0):
        pack_file(from_file, 3 + begin, half, name, path, ahead + begin * row_bytes, interleaved)
    if interleaved:  # what llama.cpp's converter did is undone
        given = given.reshape(-1, interleaved // 2, 2, row_bytes).swapaxes(1, 2).reshape(rows, row_bytes)
    from_memory.pack_blocks(3, name, np.ascontiguousarray(given))
    out = np.empty((2, rows, columns), np.float32)
    for packed, to in zip((from_file, from_memory), out, strict=True):
        packed.unpack_rows(np.arange(3, rows + 3), to)
    assert np.abs(out[0]).max() > 0
    assert np.array_equal(out[0], out[1])


def pack_file(packed, first_row, num_rows, name, path, offset, interleaved=0):
    """One tensor alone."""
    row_bytes = packed.in_features // SIZES[name][0] * SIZES[name][1]
    rows = FileRows(path, offset, row_bytes, name, interleaved)
    failed = _core.pack_files(_core.CpuThreads(2), [(packed, first_row, num_rows, rows)], [])
    if failed is not None:
        assert failed[0] == 0
        raise failed[1]


def test_a_file_that_ends_too_early_packs_nothing(tmp_path):
    packed = _core.PackedLinear(_core.CpuThreads(2), 2, 64, "int8", 32)
    path = tmp_path / "rows"
    path.write_bytes(bytes(2 * 68 - 1))
    with pytest.raises(OSError, match="failed to fill whole buffer") as caught:
        pack_file(packed, 0, 2, "Q8_0", path, 0)
    assert caught.value.errno is None
    with pytest.raises(FileNotFoundError):
        pack_file(packed, 0, 2, "Q8_0", tmp_path / "nowhere", 0)
    with pytest.raises(ValueError, match="2 rows cannot lie in turns, 3 together"):
        pack_file(packed, 0, 2, "Q8_0", path, 0, 3)
    with pytest.raises(ValueError, match="2 rows cannot lie in turns, 4 together"):
        pack_file(packed, 0, 2, "Q8_0", path, 0, 4)
    with pytest.raises(ValueError, match="rows 1 to 3"):
        pack_file(packed, 1, 2, "Q8_0", path, 0)
    path.write_bytes(bytes(2 * 68))
    pack_file(packed, 0, 2, "Q8_0", path, 0)
    packed.forward(np.zeros((1, 64), np.float32), np.zeros((1, 2), np.float32))


@pytest.fixture
def stored(tmp_path):
    """Rows of Q8_0 of 64 inputs in a file, after seven other bytes: where some of them lie, and the bytes of all."""
    blocks = random_blocks("Q8_0", 2 * 400).reshape(-1, 34)
    blocks[:, 1] &= 0x3B  # scales that are finite
    (tmp_path / "rows").write_bytes(bytes(7) + blocks.tobytes())
    return (lambda row: FileRows(tmp_path / "rows", 7 + 68 * row, 68, "Q8_0", 0)), blocks.reshape(-1, 68)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_many_layers_and_tables_are_filled_at_once(stored, num_threads):
    rows_from, blocks = stored
    threads = _core.CpuThreads(num_threads)
    whole, parted = (_core.PackedLinear(threads, 100, 64, "int8", 32) for _ in range(2))
    tables = np.zeros((2, 150, 68), np.uint8)
    layers = [
        (parted, 70, 30, rows_from(5)),  # rows 33 to 69 are missing, and come from elsewhere
        (whole, 0, 100, rows_from(200)),
        (parted, 3, 30, rows_from(100)),
        (parted, 0, 3, rows_from(300)),
    ]
    reads = [(tables[0], rows_from(0)), (tables[1, :90], rows_from(250))]
    assert _core.pack_files(threads, layers, reads) is None
    assert np.array_equal(tables[0], blocks[:150])
    assert np.array_equal(tables[1, :90], blocks[250:340])
    assert not tables[1, 90:].any()
    for packed, places in (
        (whole, {0: range(200, 300)}),
        (parted, {70: range(5, 35), 3: range(100, 130), 0: range(300, 303)}),
    ):
        for first, of in places.items():
            out = np.empty((len(of), 64), np.float32)
            packed.unpack_rows(np.arange(first, first + len(of)), out)
            assert out.any()
            assert np.array_equal(out.reshape(-1), expected("Q8_0", blocks[of.start : of.stop]))
    x, out = np.zeros((1, 64), np.float32), np.zeros((1, 100), np.float32)
    whole.forward(x, out)
    with pytest.raises(ValueError, match="37 of the weight's 100 rows have not been packed"):
        parted.forward(x, out)


def test_what_cannot_be_packed_is_named_by_its_place(stored):
    rows_from, blocks = stored
    threads = _core.CpuThreads(2)
    first, second = (_core.PackedLinear(threads, 100, 64, "int8", 32) for _ in range(2))
    table = np.zeros((100, 68), np.uint8)
    good = [(first, 0, 100, rows_from(0)), (second, 50, 50, rows_from(0)), (second, 0, 50, rows_from(100))]

    def failed(layers, tables=()):
        place, error = _core.pack_files(threads, layers, list(tables))
        return place, type(error), str(error)

    path = rows_from(0).file
    spoiled = blocks.copy()
    spoiled[120, :2] = 0xFF, 0x7F  # no number
    path.write_bytes(bytes(7) + spoiled.tobytes())
    place, kind, message = failed(good)
    assert (place, kind) == (2, ValueError)
    assert "row 20 " in message
    missing = FileRows(path.with_name("nowhere"), 0, 68, "Q8_0", 0)
    assert failed([good[0], (second, 0, 50, missing)])[:2] == (1, FileNotFoundError)
    assert failed([good[0]], [(table, rows_from(0)), (table, missing)])[:2] == (2, FileNotFoundError)
    assert failed([good[0]], [(table, rows_from(301))])[:2] == (1, OSError), "the file ends within the table"
    assert failed([good[0], (second, 0, 50, rows_from(351))])[:2] == (1, OSError)
    assert failed([good[0], (second, 51, 50, rows_from(0))])[:2] == (1, ValueError)
    place, kind, message = failed([good[0], (second, 0, 50, FileRows(path, 7, 34, "Q8_0", 0))])
    assert (place, kind) == (1, ValueError)
    assert "rows of 34 bytes are given, but 64 inputs take 68" in message
    second.pack_blocks(0, "Q8_0", blocks[:100])
    second.forward(np.zeros((1, 64), np.float32), np.zeros((1, 100), np.float32))
    table.flags.writeable = False
    with pytest.raises(ValueError, match="writable"):
        _core.pack_files(threads, [], [(table, rows_from(0))])
    assert _core.pack_files(threads, [], []) is None
