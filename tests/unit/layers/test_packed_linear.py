"""Packed products and norms of the core against torch in float64, and what they refuse."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rustvllm import _core

THREADS = _core.CpuThreads(2)
ACTIVATIONS = {
    None: lambda x: x,
    "none": lambda x: x,
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "gelu_erf": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def seen(tensor):
    """The tensor's memory as numpy takes it: bfloat16 as uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def packed(weight, kind, group_size=None):
    layer = _core.PackedLinear(THREADS, *weight.shape, kind, group_size)
    layer.pack_rows(0, seen(weight))
    return layer


def unpacked(layer):
    rows = np.empty((layer.out_features, layer.in_features), np.float32)
    for index, row in enumerate(rows):
        layer.unpack_row(index, row)
    return torch.from_numpy(rows)


@given(
    st.integers(0, 70),
    st.integers(1, 100),
    st.integers(1, 200),
    st.sampled_from(["f32", "bf16", "int8", "int8-32"]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from(list(ACTIVATIONS)),
    st.sampled_from(["nothing", "rows", "out"]),
    st.integers(0, 2**31),
)
def test_equals_torch(rows, outputs, inputs, kind, weight_dtype, dtype, activation, residual, seed):
    generator = torch.Generator().manual_seed(seed)
    kind, _, group_size = kind.partition("-")
    # As GPT-2 keeps its weights, and as rows of a wider array.
    weight = torch.randn(inputs, outputs, generator=generator).to(weight_dtype).T
    x = torch.randn(rows, inputs + 3, generator=generator).to(dtype)[:, :inputs]
    bias = torch.randn(outputs, generator=generator)
    layer = packed(weight, kind, int(group_size) if group_size else None)
    layer.set_bias(bias.numpy())
    kept = unpacked(layer)
    if kind != "int8":
        assert torch.equal(kept, weight.to(torch.bfloat16 if kind == "bf16" else torch.float32).float())
    out = torch.randn(rows, outputs, generator=generator).to(dtype)
    others = torch.randn(rows, outputs, generator=generator).to(dtype)
    expected = ACTIVATIONS[activation](x.double() @ kept.double().T + bias.double())
    if residual != "nothing":
        expected += (out if residual == "out" else others).double()
    added = {"nothing": None, "rows": seen(others), "out": seen(out)}[residual]
    layer.forward(seen(x), seen(out), activation=activation, residual=added)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@given(
    st.integers(0, 9),
    st.integers(2, 90),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from(["nothing", "residual", "sum_out", "in place"]),
    st.integers(0, 2**31),
)
def test_norms_equal_torch(rows, features, is_rms, dtype, added, seed):
    generator = torch.Generator().manual_seed(seed)
    x, residual, sum_out, out = torch.randn(4, rows, features, generator=generator).to(dtype)
    weight, bias = torch.randn(2, features, generator=generator)
    total = x if added == "nothing" else x + residual
    if is_rms:
        expected = torch.nn.functional.rms_norm(total.double(), (features,), weight.double(), 1e-5)
    else:
        expected = torch.nn.functional.layer_norm(total.double(), (features,), weight.double(), bias.double(), 1e-5)
    options = {
        "nothing": {},
        "residual": {"residual": seen(residual)},
        "sum_out": {"residual": seen(residual), "sum_out": seen(sum_out)},
        "in place": {"residual": seen(residual), "sum_out": seen(residual)},
    }[added]
    if is_rms:
        _core.rms_norm(THREADS, seen(x), weight.numpy(), 1e-5, seen(out), **options)
    else:
        _core.layer_norm(THREADS, seen(x), weight.numpy(), bias.numpy(), 1e-5, seen(out), **options)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    if "sum_out" in options:
        assert torch.equal(sum_out if added == "sum_out" else residual, total)


@pytest.mark.parametrize("kind", ["f32", "bf16", "int8", "w8a8"])
def test_a_row_alone_has_the_same_bits_as_in_company(kind):
    rng = np.random.default_rng(1)
    layer = _core.PackedLinear(THREADS, 200, 300, kind)
    layer.pack_rows(0, rng.standard_normal((200, 300), np.float32))
    x = rng.standard_normal((300, 300), np.float32)
    together, alone = np.empty((2, 300, 200), np.float32)
    layer.forward(x, together)
    for row in range(len(x)):
        layer.forward(x[row : row + 1], alone[row : row + 1])
    assert np.array_equal(together, alone)


def test_weights_come_in_pieces_and_take_what_they_say():
    weight = np.random.default_rng(2).standard_normal((100, 64), np.float32)
    sizes = {}
    for kind in ("f32", "bf16", "int8", "w8a8"):
        layer = _core.PackedLinear(THREADS, 100, 64, kind)
        for row in range(0, 100, 30):
            layer.pack_rows(row, weight[row : row + 30])
        whole = _core.PackedLinear(THREADS, 100, 64, kind)
        whole.pack_rows(0, weight)
        assert torch.equal(unpacked(layer), unpacked(whole))
        sizes[kind] = layer.nbytes
        assert layer.kind == kind
    assert 4 * 100 * 64 <= sizes["f32"] <= 4 * 128 * 65 + 1000
    assert sizes["bf16"] < 0.55 * sizes["f32"]
    assert sizes["w8a8"] == sizes["int8"] < 0.35 * sizes["f32"]


def test_rounded_activations_are_off_by_half_a_step_of_their_block():
    rng = np.random.default_rng(5)
    weight, x = rng.standard_normal((40, 96), np.float32), rng.standard_normal((7, 96), np.float32)
    x[3, :32] = 0
    out, other = np.empty((2, 7, 40), np.float32)
    layer = packed(torch.from_numpy(weight), "w8a8")
    layer.forward(x, out)
    packed(torch.from_numpy(weight), "int8").forward(x, other)
    half_steps = np.abs(x).reshape(7, 3, 32).max(2).repeat(32, 1) / 254
    allowed = half_steps @ np.abs(unpacked(layer).numpy()).T + 1e-4
    assert (np.abs(out - other) <= allowed).all()
    assert np.abs(out - other).max() > 1e-3  # they were rounded


def test_what_computes_rounded_activations_is_right():
    [few, many], refused = _core.PackedLinear.w8a8_kernels()
    assert few in ("avx512-vnni", "avx-vnni", "avx2", "portable")
    assert many in (few, "amx-int8")
    assert refused == []


ROUNDED_PRODUCT = """
import hashlib, sys
import numpy as np
from rustvllm import _core
weight, x = (np.random.default_rng(i).standard_normal((rows, 320), np.float32) for i, rows in enumerate((70, 40)))
layer = _core.PackedLinear(_core.CpuThreads(1), 70, 320, "w8a8", 64)
layer.pack_rows(0, weight)
out = np.empty((40, 70), np.float32)
for rows in (1, 7, 32):
    layer.forward(x[:rows], out[:rows])
    print(rows, hashlib.sha256(out[:rows].tobytes()).hexdigest())
print(_core.PackedLinear.kernel(), *_core.PackedLinear.w8a8_kernels()[0], file=sys.stderr)
"""
"""The bits of products of several numbers of rows; what computed them goes to standard error."""


def test_rounded_products_have_the_same_bits_with_fewer_instructions():
    """Each level in a process of its own; one that the machine lacks computes with what there is."""

    def run(level):
        environment = {**os.environ, "RUSTVLLM_CPU_INSTRUCTIONS": level}
        command = [sys.executable, "-c", ROUNDED_PRODUCT]
        found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
        return found.stdout, found.stderr.split()

    bits, best = run("")
    assert len(bits.splitlines()) == 3
    for level in ("portable", "avx2", "avx-vnni", "avx512", "avx512-vnni", "avx512-bf16"):
        found, names = run(level)
        kernel = level.removesuffix("-vnni").removesuffix("-bf16")
        assert found == bits, level
        assert names[0] in ("portable", kernel, "avx2")
        assert "amx-int8" not in names
        if best[0] == "avx512":
            assert names[0] == {"avx-vnni": "avx2"}.get(level, kernel)


STREAMS = """
import hashlib, sys
import numpy as np
from rustvllm import _core
weight, x = (np.random.default_rng(i).standard_normal((rows, 1600), np.float32) for i, rows in enumerate((70, 14)))
narrow = [(numbers.view(np.uint32) >> 16).astype(np.uint16) for numbers in (weight, x)]
for kind, weights, inputs in (("f32", weight, x), ("bf16", narrow[0], x), ("bf16", *narrow), ("w8a8", weight, x)):
    layer = _core.PackedLinear(_core.CpuThreads(2), 70, 1600, kind)
    layer.pack_rows(0, weights)
    for rows in (1, 2, 4, 5, 8, 14):
        out = np.empty((rows, 70), np.float32)
        layer.forward(inputs[:rows], out)
        print(kind, inputs.dtype, rows, hashlib.sha256(out.tobytes()).hexdigest())
print(_core.PackedLinear.num_streams(), file=sys.stderr)
"""
"""The bits of products that wait for their weights, of several chunks; the number of streams goes to standard error."""


def test_products_have_the_same_bits_with_one_stream_of_memory_and_two():
    def run(streams):
        environment = {**os.environ, "RUSTVLLM_CPU_STREAMS": streams}
        command = [sys.executable, "-c", STREAMS]
        found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
        return found.stdout, found.stderr.strip()

    (one, first), (two, second) = run("1"), run("2")
    assert (first, second) == ("1", "2")
    assert one == two
    assert len(set(one.splitlines())) == 24


NARROW_PRODUCT = """
import sys
import numpy as np
from rustvllm import _core
weight, x = (np.random.default_rng(i).standard_normal((rows, 320), np.float32) for i, rows in enumerate((70, 40)))
weight, x = ((numbers.view(np.uint32) >> 16).astype(np.uint16) for numbers in (weight, x))
layer = _core.PackedLinear(_core.CpuThreads(2), 70, 320, "bf16")
layer.pack_rows(0, weight)
out = np.empty((40, 70), np.float32)
layer.forward(x, out)
for row in range(40):
    alone = np.empty((1, 70), np.float32)
    layer.forward(x[row : row + 1], alone)
    assert (alone == out[row]).all(), row
wide = [(numbers.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for numbers in (weight, x)]
error = np.abs(out - wide[1] @ wide[0].T) / (np.abs(wide[1]) @ np.abs(wide[0]).T)
assert error.max() < 1e-6, error.max()
print(*_core.PackedLinear.bf16_kernel())
"""
"""Rows of bfloat16 times weights of bfloat16, against sums in 64 bits; prints what computed them."""


def test_products_of_bfloat16_are_right_with_fewer_instructions():
    """Each level in a process of its own; one that the machine lacks computes with what there is."""

    def run(level):
        environment = {**os.environ, "RUSTVLLM_CPU_INSTRUCTIONS": level}
        command = [sys.executable, "-c", NARROW_PRODUCT]
        found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
        return found.stdout.split()

    has_instructions = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    for level in ("portable", "avx2", "avx512-vnni"):
        assert run(level)[0] in ("portable", "avx2", "avx512")
    assert run("avx512-bf16") == [("avx512-bf16" if has_instructions else run("avx512-vnni")[0]), "False"]


def test_what_the_processor_reaches_is_measured():
    peaks = [_core.CpuThreads(1).peak(kind) for kind in ("f32", "bf16", "int8")]
    assert all(peak is None or peak > 1e8 for peak in peaks)
    assert (peaks[0] is None) == (_core.PackedLinear.kernel() not in ("avx512", "avx2"))
    with pytest.raises(ValueError, match='kind is "int4", but it must be f32, bf16 or int8'):
        _core.CpuThreads(1).peak("int4")


def test_threads_are_shared_with_attention():
    threads = _core.CpuThreads(3, spin_us=0)
    assert _core.CpuAttention(threads).num_threads == threads.num_threads == 3
    assert _core.CpuAttention(2).num_threads == 2


def test_threads_of_python_may_compute_at_the_same_time():
    weight = np.random.default_rng(3).standard_normal((1000, 800), np.float32)
    layer = _core.PackedLinear(THREADS, 1000, 800, "f32")
    layer.pack_rows(0, weight)
    x = np.random.default_rng(4).standard_normal((8, 800), np.float32)
    expected = np.empty((8, 1000), np.float32)
    layer.forward(x, expected)
    outs = np.zeros((4, 8, 1000), np.float32)

    def compute(out):
        for _ in range(20):
            layer.forward(x, out)

    workers = [threading.Thread(target=compute, args=(out,)) for out in outs]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert all(np.array_equal(out, expected) for out in outs)


def test_bad_arrays_are_refused_and_a_good_call_follows():
    layer = _core.PackedLinear(THREADS, 6, 4, "f32")
    x, out = np.ones((2, 4), np.float32), np.zeros((2, 6), np.float32)
    with pytest.raises(ValueError, match="6 of the weight's 6 rows have not been packed"):
        layer.forward(x, out)
    with pytest.raises(ValueError, match=r"rows 5 to 7 \(excluded\) of the weight are given, but it has 6"):
        layer.pack_rows(5, np.ones((2, 4), np.float32))
    with pytest.raises(ValueError, match="a row of the weight has 3 elements, but 4 are needed"):
        layer.pack_rows(0, np.ones((2, 3), np.float32))
    with pytest.raises(ValueError, match="weight has 1 dimensions, but it must have 2"):
        layer.pack_rows(0, np.ones(4, np.float32))
    with pytest.raises(TypeError, match="weight must be an array of float32, or of bfloat16 seen as uint16"):
        layer.pack_rows(0, np.ones((6, 4)))
    layer.pack_rows(0, np.ones((6, 4), np.float32))
    with pytest.raises(ValueError, match=r"x has the shape \(2, 3\), but \(2, 4\) is needed"):
        layer.forward(x[:, :3], out)
    with pytest.raises(ValueError, match=r"out has the shape \(1, 6\), but \(2, 6\) is needed"):
        layer.forward(x, out[:1])
    with pytest.raises(ValueError, match="its rows must be contiguous"):
        layer.forward(np.ones((4, 2), np.float32).T, out)
    with pytest.raises(ValueError, match='activation is "gelu", but it must be one of none, relu, silu'):
        layer.forward(x, out, activation="gelu")
    both = np.ones((2, 10), np.float32)
    with pytest.raises(ValueError, match="x and out share memory"):
        layer.forward(both[:, :4], both[:, 4:])
    rows = np.zeros((3, 6), np.float32)
    with pytest.raises(ValueError, match="residual and out share memory"):
        layer.forward(x, rows[:2], residual=rows[1:])
    with pytest.raises(TypeError, match="residual must be"):
        layer.forward(x, out, residual=np.zeros((2, 6), np.uint16))
    with pytest.raises(TypeError, match="out must be"):
        layer.forward(x, np.zeros((2, 6)))
    read_only = np.zeros((2, 6), np.float32)
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="out must be writable"):
        layer.forward(x, read_only)
    with pytest.raises(ValueError, match="bias has 5 elements, but 6 are needed"):
        layer.set_bias(np.ones(5, np.float32))
    with pytest.raises(ValueError, match="out must be writable"):
        layer.unpack_row(0, read_only[0, :4])
    assert not out.any()
    layer.forward(x, out)
    assert (out == 4).all()


def test_bad_shapes_are_refused():
    with pytest.raises(
        ValueError, match='kind is "int3", but it must be f32, bf16, f16, int8, w8a8, int6, w6a8, int4 or w4a8'
    ):
        _core.PackedLinear(THREADS, 2, 2, "int3")
    with pytest.raises(ValueError, match='scales is "f8", but it must be f32, f16, bf16 or two-level'):
        _core.PackedLinear(THREADS, 2, 32, "int4", 32, scales="f8")
    with pytest.raises(ValueError, match='zeros is "none", but it must be middle, point, minimum or codes'):
        _core.PackedLinear(THREADS, 2, 32, "int4", 32, zeros="none")
    with pytest.raises(ValueError, match="a multiple of 256 inputs, of which there are 64"):
        _core.PackedLinear(THREADS, 2, 64, "int4", 32, scales="two-level", zeros="minimum")
    with pytest.raises(ValueError, match="group_size is 32, but only int8 weights have groups"):
        _core.PackedLinear(THREADS, 2, 2, "bf16", 32)
    with pytest.raises(ValueError, match="in_features is 0, but it must lie between 1 and 16777216"):
        _core.PackedLinear(THREADS, 2, 0, "f32")
    with pytest.raises(MemoryError, match="1125899906842624 bytes for 16777216 x 16777216 weights"):
        _core.PackedLinear(THREADS, 1 << 24, 1 << 24, "f32")
    with pytest.raises(
        ValueError,
        match="group_size is 24, but where activations are rounded to 8 bits, and for weights of 4 bits, it must",
    ):
        _core.PackedLinear(THREADS, 2, 48, "w8a8", 24)
    with pytest.raises(ValueError, match="packed for activations of 8 bits, whose products choose"):
        _core.PackedLinear(THREADS, 2, 48, "w8a8").set_matrix_rows(1)
    layer = _core.PackedLinear(THREADS, 2, 2, "int8")
    with pytest.raises(ValueError, match="row 1 of the weight has an element that is not finite"):
        layer.pack_rows(0, np.array([[1, 2], [np.nan, 0]], np.float32))
    with pytest.raises(ValueError, match="num_threads is 0, but it must lie between 1 and 1024"):
        _core.CpuThreads(0)
    with pytest.raises(ValueError, match="spin_us is 2000000, but it must be at most 1000000"):
        _core.CpuThreads(1, spin_us=2_000_000)
    x = np.ones((2, 4), np.float32)
    with pytest.raises(ValueError, match="sum_out is given without the residual"):
        _core.rms_norm(THREADS, x, x[0], 1e-5, np.empty_like(x), sum_out=np.empty_like(x))
    with pytest.raises(ValueError, match="x and out share memory"):
        _core.rms_norm(THREADS, x, x[0], 1e-5, x)


def test_the_matrix_unit_is_there_or_refused():
    layer = packed(torch.ones(3, 4), "f32")
    layer.set_matrix_rows(None)
    if _core.PackedLinear.has_matrix_unit():
        layer.set_matrix_rows(1)
        out = np.empty((2, 3), np.float32)
        layer.forward(np.ones((2, 4), np.float32), out)
        assert (out == 4).all()
    else:
        with pytest.raises(ValueError, match="this machine has no matrix unit that the kernel"):
            layer.set_matrix_rows(1)


def test_whole_numbers_and_their_order_are_checked():
    layer = _core.PackedLinear(THREADS, 3, 8, "int8", 4)
    numbers, scales = np.arange(24, dtype=np.int8).reshape(3, 8), np.ones((3, 2), np.float32)
    with pytest.raises(TypeError, match="numbers must be an array of int8"):
        layer.pack_whole(0, numbers.astype(np.uint8), scales)
    with pytest.raises(TypeError, match="scales must be an array of float32"):
        layer.pack_whole(0, numbers, scales.astype(np.float64))
    with pytest.raises(ValueError, match=r"numbers has the shape \(3, 7\), but \(3, 8\) is needed"):
        layer.pack_whole(0, numbers[:, :7], scales)
    with pytest.raises(ValueError, match=r"scales has the shape \(3, 1\), but \(3, 2\) is needed"):
        layer.pack_whole(0, numbers, scales[:, :1])
    with pytest.raises(ValueError, match="rows 1 to 4"):
        layer.pack_whole(1, numbers, scales)
    with pytest.raises(ValueError, match="not finite"):
        layer.pack_whole(0, numbers, np.full((3, 2), np.inf, np.float32))
    with pytest.raises(ValueError, match="not as int8"):
        _core.PackedLinear(THREADS, 3, 8, "f32").pack_whole(0, numbers, scales)
    with pytest.raises(TypeError, match="order must be an array of uint32"):
        layer.set_input_order(np.arange(8))
    for order, says in (
        ([0, 1, 2], "the order of the inputs has 3 elements, but 8 are needed"),
        ([0, 1, 2, 3, 4, 5, 6, 6], "names input 6 at place 7, but each of 8 must occur once"),
    ):
        with pytest.raises(ValueError, match=says):
            layer.set_input_order(np.array(order, np.uint32))
    order = np.array([7, 6, 5, 4, 3, 2, 1, 0], np.uint32)
    layer.set_input_order(order)
    layer.pack_whole(0, numbers, scales)
    assert torch.equal(unpacked(layer), torch.from_numpy(numbers[:, ::-1].astype(np.float32)))
    with pytest.raises(ValueError, match="an order of their own"):
        layer.pack_rows(0, scales.repeat(4, axis=1))
