"""Kernels of dense layers on the CPU against float64; which of them is chosen, and what is kept of a weight."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rustvllm import _core
from rustvllm.exceptions import ModelLoadError
from rustvllm.layers.activation import ACTIVATIONS
from rustvllm.layers.cpu.choice import best_matrix_rows, choose, measure
from rustvllm.layers.cpu.linear import ROW_CLASSES, CoreLinear, LinearByRows, OneDnnLinear, TorchLinear, row_class
from rustvllm.layers.cpu.options import LinearOptions
from rustvllm.layers.cpu.packer import LinearPacker
from rustvllm.layers.linear import Embedding, Linear

ROWS = [0, 1, 2, 3, 5, 8, 17, 33, 64, 130, 300]
FAR = {torch.float32: 2e-5, torch.bfloat16: 2.0**-6}


@pytest.fixture(autouse=True, scope="module")
def one_thread_of_torch():
    """Two of them would wait for each other, and for the core's, on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def threads():
    return _core.CpuThreads(2)


def kernels(threads, weight, bias):
    found = {"torch": TorchLinear(weight, bias), "core": CoreLinear(threads, weight, bias)}
    if OneDnnLinear.is_available(weight.dtype):
        found["onednn"] = OneDnnLinear(weight, bias)
    found["by rows"] = LinearByRows([[*found.values()][index % len(found)] for index in range(len(ROW_CLASSES))])
    return found


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(x, weight, bias, activation, residual):
    out = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    if activation is not None:
        out = activation(out)
    return out if residual is None else out + residual.double()


def assert_near(found, expected, dtype):
    assert found.dtype == dtype
    assert found.shape == expected.shape
    if found.numel():
        distance = (found.double() - expected).abs().max().item()
        assert distance <= FAR[dtype] * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (48, 64), (37, 53), (130, 257)])
def test_every_kernel_computes_the_layer(threads, dtype, out_features, in_features):
    weight = random(out_features, in_features, dtype=dtype) * in_features**-0.5
    bias = random(out_features, dtype=dtype, seed=1)
    for with_bias in (None, bias):
        for kernel in kernels(threads, weight, with_bias).values():
            for rows in ROWS:
                x = random(rows, in_features, dtype=dtype, seed=2)
                found = kernel.forward(x, None, None)
                assert_near(found, exact(x, weight, with_bias, None, None), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", [None, "gelu_new", "gelu", "silu", "relu", "tanh", "relu2"])
def test_what_follows_the_product_is_the_same_fused(threads, dtype, activation):
    function = None if activation is None else ACTIVATIONS[activation]
    weight, bias = random(40, 24, dtype=dtype) * 0.2, random(40, dtype=dtype, seed=1)
    for kernel in kernels(threads, weight, bias).values():
        for rows in (0, 1, 4, 70):
            x, residual = random(rows, 24, dtype=dtype, seed=2), random(rows, 40, dtype=dtype, seed=3)
            before = residual.clone()
            for added in (None, residual):
                found = kernel.forward(x, function, added)
                assert_near(found, exact(x, weight, bias, function, added), dtype)
            assert torch.equal(residual, before)  # it is read and never written


def test_rows_may_lie_apart_and_shapes_may_have_more_dimensions(threads):
    weight, bias = random(20, 12), random(20, seed=1)
    wide = random(2, 5, 40, seed=2)
    residual = random(2, 5, 60, seed=3)[..., ::3]
    for kernel in kernels(threads, weight, bias).values():
        x = wide[..., 4:16]
        assert_near(kernel.forward(x, None, None), exact(x, weight, bias, None, None), torch.float32)
        assert_near(kernel.forward(x, None, residual), exact(x, weight, bias, None, residual), torch.float32)
        turned = wide[0].t()[:12].t()  # a column apart
        assert_near(kernel.forward(turned, None, None), exact(turned, weight, bias, None, None), torch.float32)
        backwards = wide[0].t()[16:28]  # [12, 5]: rows are columns of what lies in memory
        square = CoreLinear(threads, random(3, 5), None)
        assert_near(
            square.forward(backwards, None, None), exact(backwards, random(3, 5), None, None, None), torch.float32
        )


@pytest.mark.parametrize("group_size", [None, 16, 32])
def test_weights_of_one_byte(threads, group_size):
    weight, bias = random(50, 72) * 0.1, random(50, seed=1)
    kernel = CoreLinear(threads, weight, bias, "int8", group_size)
    x = random(6, 72, seed=2)
    # Half a step of the rounding for every weight, each group with a step of its own.
    groups = weight.abs().split(group_size or 72, dim=1)
    half_steps = torch.cat([group.amax(1, keepdim=True).expand_as(group) / 254 for group in groups], dim=1)
    allowed = x.abs().double() @ half_steps.double().t() + 1e-4
    distance = (kernel.forward(x, None, None).double() - exact(x, weight, bias, None, None)).abs()
    assert bool((distance <= allowed).all())
    assert distance.max() > 1e-4  # it was rounded
    assert kernel.nbytes < weight.nbytes / 2


def test_the_core_gives_a_row_the_same_bits_in_any_company(threads):
    for dtype, kind in ((torch.float32, None), (torch.bfloat16, None), (torch.float32, "int8")):
        weight, bias, x = random(70, 100, dtype=dtype), random(70, dtype=dtype, seed=1), random(90, 100, dtype=dtype)
        kernel = CoreLinear(threads, weight, bias, kind)
        together = kernel.forward(x, ACTIVATIONS["gelu_new"], None)
        for begin, end in ((0, 1), (1, 3), (3, 20), (20, 53), (53, 90)):
            assert torch.equal(kernel.forward(x[begin:end], ACTIVATIONS["gelu_new"], None), together[begin:end])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_has_no_int8(threads, value):
    weight = random(8, 16)
    weight[3, 5] = value
    with pytest.raises(ModelLoadError, match="a weight of 8 x 16 cannot be packed: "):
        CoreLinear(threads, weight, None, "int8")


def test_classes_of_rows():
    assert [row_class(rows) for rows in (0, 1, 2, 3, 4, 5, 8, 9, 128, 129, 256, 257, 10**6)] == [
        0, 0, 1, 2, 2, 3, 3, 4, 7, 8, 8, 8, 8,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="2 kernels were given for 9 classes"):
        LinearByRows([TorchLinear(random(2, 2), None)] * 2)


class Wrong:
    """A kernel that is quick and wrong, in one number of one class of rows."""

    nbytes = 0

    def __init__(self, kernel, value):
        self.kernel, self.value = kernel, value

    def forward(self, x, activation, residual):
        out = self.kernel.forward(x, activation, residual)
        if x.shape[0] == 32:
            out[3, 5] += self.value
        return out


class Broken:
    nbytes = 0

    def forward(self, x, activation, residual):
        raise RuntimeError("no such instruction\nand more")


@pytest.mark.parametrize("value", [0.5, math.nan])
def test_only_what_computes_right_is_chosen(value, caplog):
    plain = TorchLinear(random(64, 32), None)
    times = measure({"a": Wrong(plain, value), "b": Broken(), "torch": plain}, 32, torch.float32, 1.0, lambda: None)
    assert all(math.isfinite(seconds) for seconds in times["torch"])
    for name in "ab":
        assert all(seconds == math.inf for seconds in times[name])
    assert "skipping a: for 32 rows its result differs" in caplog.text
    assert "skipping b, which cannot compute on this machine: no such instruction\n" in caplog.text
    assert choose(times, at_least=0.0, has_plain=False, room_for=5).layouts == ("torch",)


def test_a_measurement_without_time_measures_what_it_must():
    seen = []

    class Watched(TorchLinear):
        def forward(self, x, activation, residual):
            seen.append(x.shape[0])
            return super().forward(x, activation, residual)

    pushed = []
    measure({"torch": Watched(random(64, 32), None)}, 32, torch.float32, 0.0, lambda: pushed.append(seen[-1]))
    assert set(seen) == {1, 32, 256}
    assert set(pushed) == {1, 32}  # with few rows the weight is to come from memory


def times_of(**by_name):
    return {name: [float(times[min(index, len(times) - 1)]) for index in range(9)] for name, times in by_name.items()}


def test_a_second_copy_must_pay_and_have_room():
    times = times_of(core=[1, 1, 1, 1, 1, 9], onednn=[3, 3, 3, 3, 3, 1], torch=[9])
    assert choose(times, at_least=0.0, has_plain=False, room_for=0).layouts == ("onednn",)
    two = choose(times, at_least=0.0, has_plain=False, room_for=1)
    assert two.names == ("core",) * 5 + ("onednn",) * 4
    assert str(two) == "core from 1 row, onednn from 17 rows"
    even = times_of(core=[1, 1, 1, 1, 1, 1.05], onednn=[1.05, 1.05, 1.05, 1.05, 1.05, 1], torch=[9])
    assert choose(even, at_least=0.0, has_plain=False, room_for=2).layouts == ("core",)


def test_who_is_ahead_only_while_the_weight_is_near_is_not_ahead():
    times = times_of(core=[3, 3, 3, 3, 3, 5], torch=[1, 1, 1, 1, 1, 6])
    assert choose(times, at_least=0.0, has_plain=False, room_for=0).layouts == ("torch",)
    assert choose(times, at_least=3.0, has_plain=False, room_for=0).layouts == ("core",)


def test_who_is_there_already_stays_unless_another_is_clearly_better():
    times = times_of(core=[1.08], onednn=[1], torch=[1])
    assert choose(times, at_least=0.0, has_plain=False, room_for=0).layouts == ("core",)
    assert choose(times_of(core=[1.2], onednn=[1]), at_least=0.0, has_plain=False, room_for=0).layouts == ("onednn",)


def test_a_tied_head_has_its_plain_weight_for_nothing():
    times = times_of(core=[2, 1], onednn=[9], torch=[1, 2])
    assert choose(times, at_least=0.0, has_plain=True, room_for=0).layouts == ("torch",)
    assert choose(times, at_least=0.0, has_plain=True, room_for=1).names == ("torch",) + ("core",) * 8


def test_the_plain_one_stays_when_nothing_else_is_right():
    times = times_of(core=[math.inf], torch=[1])
    assert choose(times, at_least=0.0, has_plain=False, room_for=0).names == ("torch",) * 9


class Unit:
    """A kernel whose time per row is known, with and without the matrix unit."""

    def __init__(self, clock, unit_overhead):
        self.packed, self.clock, self.unit_overhead = self, clock, unit_overhead
        self.in_features, self.matrix_rows = 4, None

    def use_matrix_unit(self, num_rows):
        self.matrix_rows = num_rows

    def forward(self, x, activation, residual):
        rows = x.shape[0]
        self.clock[0] += rows if self.matrix_rows is None else self.unit_overhead + rows / 2


@pytest.mark.parametrize(("overhead", "expected"), [(0.5, 2), (5, 9), (50, 65), (500, None)])
def test_the_matrix_unit_computes_from_where_it_is_faster(monkeypatch, overhead, expected):
    clock = [0.0]
    monkeypatch.setattr("rustvllm.layers.cpu.choice.time.perf_counter", lambda: clock[0])
    kernel = Unit(clock, overhead)
    assert best_matrix_rows(kernel, torch.float32, lambda: None) == expected
    assert kernel.matrix_rows is None


needs_matrix_unit = pytest.mark.skipif(not CoreLinear.has_matrix_unit(), reason="the machine has no matrix unit")


@needs_matrix_unit
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [None, "int8"])
def test_the_matrix_unit_is_as_exact(threads, dtype, kind):
    weight, bias = random(200, 300, dtype=dtype), random(200)
    kernel = CoreLinear(threads, weight, bias, kind)
    kept = kernel.unpack(200)
    x, residual = random(70, 300, seed=4, dtype=dtype), random(70, 200, seed=5, dtype=dtype)
    few = kernel.forward(x[:4], None, None)
    kernel.use_matrix_unit(5)
    assert torch.equal(kernel.forward(x[:4], None, None), few)
    for rows in (5, 16, 33, 70):
        expected = exact(x[:rows], kept, bias, F.silu, residual[:rows])
        assert_near(kernel.forward(x[:rows], F.silu, residual[:rows]), expected, dtype)


@needs_matrix_unit
@pytest.mark.parametrize("matrix_unit", [True, False])
@pytest.mark.parametrize("kernel", [None, "core"])
def test_layers_use_the_matrix_unit_if_they_may(threads, monkeypatch, kernel, matrix_unit):
    asked = []

    def best(kernel, dtype, push_out):
        asked.append(kernel.packed.in_features)
        return 17

    monkeypatch.setattr("rustvllm.layers.cpu.trials.best_matrix_rows", best)
    used = []
    monkeypatch.setattr(CoreLinear, "use_matrix_unit", lambda self, num_rows: used.append(num_rows))
    pack(threads, Model(), options=LinearOptions(kernel, matrix_unit=matrix_unit))
    assert bool(asked) == matrix_unit
    assert (17 in used) == matrix_unit


class Model(nn.Module):
    """Two equal layers, a small one and an embedding."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        self.embed = Embedding(2100, 256)
        self.layers = nn.ModuleList(Linear(256, 2048, bias=True) for _ in range(2))
        self.small = Linear(16, 16, bias=False)
        torch.set_default_dtype(before)


def pack(threads, model, *, options=None, room=1 << 30, tied=True):
    embedding = model.embed.weight if tied else None
    packer = LinearPacker(threads, options or LinearOptions(), model, embedding, room)
    packer.watch(model, embedding)
    with torch.inference_mode():
        for name in [name for name, _ in model.named_parameters()]:
            parameter = model.get_parameter(name)
            # As a loader does it: in pieces, a fused layer's parts one after the other.
            for part in parameter.split(parameter.shape[0] // 2):
                part.copy_(random(*part.shape, seed=len(name)) * 0.1)
                packer.filled(part)
        return packer.finish(model, embedding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", [None, "torch", "core", "onednn"])
def test_a_packed_model_computes_the_same(threads, dtype, kernel, caplog):
    if kernel == "onednn" and not OneDnnLinear.is_available(dtype):
        pytest.skip(f"oneDNN has no products in {dtype} on this processor")
    plain, model = Model(dtype), Model(dtype)
    pack(threads, plain, options=LinearOptions("torch"))
    with caplog.at_level("INFO"):
        head = pack(threads, model, options=LinearOptions(kernel))
    assert "dense layers: " in caplog.text
    x = random(5, 256, dtype=dtype)
    for ours, reference in zip(model.layers, plain.layers, strict=True):
        expected = exact(x, reference.weight, reference.bias, None, None)
        assert_near(ours(x), expected, dtype)
        assert_near(ours(x, activation=F.silu, residual=x.repeat(1, 8)), F.silu(expected) + x.repeat(1, 8), dtype)
    assert_near(head.forward(x, None, None), exact(x, plain.embed.weight, None, None, None), dtype)
    assert torch.equal(model.embed.weight, plain.embed.weight)  # it stays for its look-ups
    if kernel in ("core", "onednn"):
        assert all(layer.weight.is_meta for layer in model.layers)
        assert model.layers[0].weight.shape == (2048, 256)


def test_a_layer_is_packed_once_its_last_part_is_there(threads):
    model = Model()
    packer = LinearPacker(threads, LinearOptions("core"), model, None, 0)
    packer.watch(model, None)
    layer = model.layers[1]
    with torch.inference_mode():
        for target in (layer.weight[:200], model.embed.weight, layer.bias, layer.weight[200:]):
            assert layer.kernel is None
            target.fill_(0.5)
            packer.filled(target)
    assert layer.kernel is not None
    assert layer.weight.is_meta
    assert model.layers[0].kernel is None
    assert packer.finish(model, None) is None
    assert model.layers[0].kernel is not None


def test_a_head_that_is_a_layer_of_its_own_name_is_packed_once(threads):
    model = Model()
    model.head = Linear(256, 2100, bias=False)
    model.head.weight = model.embed.weight
    assert pack(threads, model, options=LinearOptions("core")) is None
    assert model.head.weight is model.embed.weight
    assert not model.embed.weight.is_meta
    x = random(3, 256)
    assert_near(model.head(x), exact(x, model.embed.weight, None, None, None), torch.float32)


def test_no_copy_of_the_embedding_without_room(threads):
    model = Model()
    head = pack(threads, model, room=model.embed.weight.nbytes - 1)
    assert isinstance(head, TorchLinear)


def test_int8_counts_less(threads):
    model = Model()
    packer = LinearPacker(threads, LinearOptions("core", "int8"), model, None, 0)
    plain = sum(parameter.nbytes for parameter in model.parameters())
    weights = 2 * 2048 * 256 + 16 * 16
    assert packer.resident_bytes(plain) == plain - 3 * weights + 4 * (2 * 2048 + 16)
    pack(threads, model, options=LinearOptions("core", "int8"), tied=False)
    assert sum(layer.kernel.nbytes for layer in (*model.layers, model.small)) < 1.1 * (weights + 4 * (2 * 2048 + 16))


@pytest.mark.parametrize("refused", [[], ["avx2"]])
def test_the_log_names_what_computes_rounded_activations(threads, monkeypatch, caplog, refused):
    found = SimpleNamespace(w8a8_kernels=lambda: (["portable", "portable"], refused))
    monkeypatch.setattr("rustvllm.layers.cpu.log._core", SimpleNamespace(PackedLinear=found))
    with caplog.at_level("INFO", logger="rustvllm"):
        pack(threads, Model(), options=LinearOptions("core", "int8", round_activations=True), tied=False)
    lines = [record.getMessage() for record in caplog.records if "8 and 4 bits" in record.getMessage()]
    assert lines[0].startswith("weights of 8 and 4 bits: activations are rounded to 8 bits in ")
    assert " for portable products" in lines[0]
    assert lines[1:] == [
        f"weights of 8 and 4 bits: not using the {name} products, because their results differ from plain code on this "
        "processor"
        for name in refused
    ]


@pytest.mark.parametrize("is_refused", [False, True])
def test_the_log_names_products_of_bfloat16_that_are_wrong(threads, monkeypatch, caplog, is_refused):
    found = SimpleNamespace(bf16_kernel=lambda: ("avx512", is_refused))
    monkeypatch.setattr("rustvllm.layers.cpu.log._core", SimpleNamespace(PackedLinear=found))
    with caplog.at_level("DEBUG", logger="rustvllm"):
        pack(threads, Model(torch.bfloat16), options=LinearOptions("core"), tied=False)
        pack(threads, Model(torch.float32), options=LinearOptions("core"), tied=False)
    lines = [record.getMessage() for record in caplog.records if "bfloat16 weights" in record.getMessage()]
    assert lines[0] == "bfloat16 weights: avx512 products with bfloat16 rows in 3 layers"
    assert ["are wrong" in line for line in lines[1:]] == [True] * is_refused


@pytest.mark.parametrize("is_best", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_are_the_cores_without_a_measurement_where_nothing_can_be_faster(threads, monkeypatch, is_best, dtype):
    measured = []

    def record(contenders, *args):
        measured.append(list(contenders))
        return measure(contenders, *args)

    monkeypatch.setattr("rustvllm.layers.cpu.trials.measure", record)
    monkeypatch.setattr(CoreLinear, "is_as_fast_as_the_processor", staticmethod(lambda _: is_best))
    model = Model(dtype)
    pack(threads, model, tied=False)
    assert len(measured) == (0 if is_best else 1)
    assert not is_best or all(isinstance(layer.kernel, CoreLinear) for layer in model.layers)


def test_what_is_as_fast_as_the_processor():
    is_wide = _core.PackedLinear.kernel() == "avx512" and not CoreLinear.has_matrix_unit()
    narrow = _core.PackedLinear.bf16_kernel()[0] == "avx512-bf16"
    assert CoreLinear.is_as_fast_as_the_processor(torch.float32) == is_wide
    assert CoreLinear.is_as_fast_as_the_processor(torch.bfloat16) == (is_wide and narrow)
    assert not CoreLinear.is_as_fast_as_the_processor(torch.float16)
