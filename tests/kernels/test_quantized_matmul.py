"""Products with weights of 4 and 8 bits against plain torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import DTYPES, TOLERANCES

from rustvllm.kernels import quantized_matmul, reference
from rustvllm.kernels.quantized_matmul import QuantizedWeight, pack_nibbles, quantized_linear, unpack

ZEROS = ["middle", "point", "minimum"]


def make_weight(seed, bits, zeros, group_size, shape, kept, device):
    """Random numbers, scales and offsets."""
    generator = torch.Generator().manual_seed(seed)
    out_features, in_features = shape
    groups = -(-in_features // group_size)
    low, high = (0, 16) if bits == 4 else (-128, 128)
    numbers = torch.randint(low, high, shape, generator=generator)
    scales = (torch.rand((groups, out_features), generator=generator) + 0.5) / (high - low)
    offsets = None
    if zeros == "point":
        offsets = torch.randint(0, 16, scales.shape, generator=generator).to(torch.uint8).to(device)
    elif zeros == "minimum":
        offsets = torch.rand(scales.shape, generator=generator).to(kept).to(device)
    stored = pack_nibbles(numbers.to(torch.uint8)) if bits == 4 else numbers.to(torch.int8)
    return QuantizedWeight(stored.to(device), scales.to(kept).to(device), offsets, in_features, group_size)


def make_rows(seed, *shape, dtype, device):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


@pytest.fixture
def sums(monkeypatch):
    """Launches that add up what was split."""
    seen, inner = [], quantized_matmul._sum_kernel.run
    monkeypatch.setattr(
        quantized_matmul._sum_kernel, "run", lambda *args, **options: seen.append(1) or inner(*args, **options)
    )
    return seen


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_products_of_every_form(bits, dtype, device):
    @settings(max_examples=9, derandomize=True, deadline=None)
    @given(
        st.sampled_from(ZEROS if bits == 4 else ["middle", "minimum"]),
        st.sampled_from([8, 16, 32, 64, 96, 128, 1000]),
        st.sampled_from([1, 30]),
        st.sampled_from([8, 96, 200]),
        st.sampled_from([0, 1, 5, 17, 40]),
        st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
        st.booleans(), st.booleans(), st.integers(0, 2**31),
    )  # fmt: skip
    def run(zeros, group_size, out_features, in_features, num_rows, kept, has_bias, has_residual, seed):
        weight = make_weight(seed, bits, zeros, group_size, (out_features, in_features), kept, device)
        x = make_rows(seed + 1, num_rows, in_features, dtype=dtype, device=device) * in_features**-0.5
        residual, bias = make_rows(seed + 2, num_rows + 1, out_features, dtype=dtype, device=device).split(
            [num_rows, 1]
        )
        bias, residual = bias[0] if has_bias else None, residual if has_residual else None
        expected = reference.quantized_linear(x, weight, bias, residual)
        for is_invariant in (False, True):
            actual = quantized_linear(x, weight, bias, residual, is_invariant=is_invariant)
            torch.testing.assert_close(actual, expected, **TOLERANCES[dtype])

    run()


@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("bits", [4, 8])
def test_unpacked_rows(bits, zeros, device):
    for group_size in (16, 32, 64, 500):
        weight = make_weight(
            group_size, bits, zeros if bits == 4 else "middle", group_size, (35, 200), torch.float16, device
        )
        whole = reference.unpack(weight)
        assert whole.abs().max() > 0
        for dtype in (torch.float32, torch.float16):
            torch.testing.assert_close(unpack(weight, dtype), whole.to(dtype), atol=1e-6, rtol=1e-3)
        assert torch.equal(unpack(weight, torch.float32, 7, 20), unpack(weight, torch.float32)[20:27])


def test_numbers_of_4_bits_keep_their_places(device):
    numbers = torch.randint(0, 16, (3, 100), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    stored = pack_nibbles(numbers)
    assert stored.shape == (3, quantized_matmul.nibble_bytes(100))
    ones = torch.ones((100, 3), device=device)
    weight = QuantizedWeight(stored.to(device), ones, torch.zeros_like(ones), 100, 1)
    assert torch.equal(unpack(weight, torch.float32).cpu(), numbers.float())


def test_few_rows_of_many_features_are_split(sums, device):
    in_features = 4096 if device.type == "cuda" else 512
    weight = make_weight(3, 4, "point", 32, (16, in_features), torch.float16, device)
    x = make_rows(4, 2, in_features, dtype=torch.float32, device=device) * in_features**-0.5
    out, residual = quantized_linear(x, weight), make_rows(5, 2, 16, dtype=torch.float32, device=device)
    assert len(sums) == 1
    torch.testing.assert_close(out, reference.quantized_linear(x, weight), **TOLERANCES[torch.float32])
    torch.testing.assert_close(quantized_linear(x, weight, None, residual), out + residual)
    assert len(sums) == 2
    quantized_linear(x, weight, is_invariant=True)
    assert len(sums) == 2


@pytest.mark.usefixtures("rows_alike")
def test_a_row_has_the_same_bits_in_any_company(device):
    weight = make_weight(7, 4, "point", 64, (40, 256), torch.float16, device)
    x = make_rows(8, 50, 256, dtype=torch.float32, device=device)
    together = quantized_linear(x, weight, is_invariant=True)
    for row in (0, 1, 31, 49):
        assert torch.equal(quantized_linear(x[row : row + 1], weight, is_invariant=True)[0], together[row])
