"""What is written into the cache, as it is and in eight bits, against torch's own conversions."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import DTYPES

from rustvllm.kernels import reference
from rustvllm.kernels.fp8 import decode_e4m3, encode_e4m3
from rustvllm.kernels.kv_write import kv_write


@triton.jit
def _convert(code_ptr, value_ptr, x_ptr, n, NATIVE: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    code = encode_e4m3(tl.load(x_ptr + index, mask=index < n, other=0.0))
    tl.store(code_ptr + index, code, mask=index < n)
    tl.store(value_ptr + index, decode_e4m3(code, NATIVE).to(tl.float32), mask=index < n)


def convert(x, *, native):
    code, value = torch.empty(x.shape, dtype=torch.uint8, device=x.device), torch.empty_like(x)
    _convert[(triton.cdiv(x.numel(), 1024),)](
        code, value, x, x.numel(), NATIVE=native, BLOCK=1024, enable_fp_fusion=True
    )
    return code, value


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_e4m3_is_torchs(native, device):
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[~every.isnan()]
    halves = (every.sort().values[1:] + every.sort().values[:-1]) / 2  # ties
    around = torch.cat([torch.nextafter(halves, torch.tensor(to)) for to in (-torch.inf, torch.inf)])
    extremes = torch.tensor([449.0, 464.0, 1e30, -1e30, torch.inf, -torch.inf, 1e-30, -1e-30, 0.0, -0.0])
    random = torch.randn(500, generator=torch.Generator().manual_seed(0)) * 10
    x = torch.cat((every, halves, around, extremes, random)).to(device)
    code, value = convert(x, native=native)
    assert torch.equal(code, reference.encode_e4m3(x))
    assert torch.equal(value, reference.decode_e4m3(code))
    code, value = convert(torch.tensor([torch.nan, 1.0], device=device), native=native)
    assert value.isnan().tolist() == [True, False]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fp8", [False, True])
def test_slots(dtype, fp8, device):
    @settings(max_examples=8, derandomize=True, deadline=None)
    @given(st.integers(0, 5), st.integers(1, 3), st.sampled_from([1, 8, 20, 600]), st.integers(0, 2**31))
    def run(num_tokens, num_heads, head_dim, seed):
        generator = torch.Generator().manual_seed(seed)
        both = torch.randn(num_tokens, 2 * num_heads + 1, head_dim, generator=generator).to(device, dtype) * 50
        key, value = both[:, :num_heads], both[:, num_heads:-1]
        shape = (2, 4, 3, num_heads, head_dim)
        cache = torch.full(shape, 0x7F, dtype=torch.uint8) if fp8 else torch.full(shape, torch.nan, dtype=dtype)
        cache = cache.to(device)
        slots = torch.randperm(12, generator=generator)[: num_tokens + 1].int().to(device)
        slots[::3] = -1
        expected = cache.clone()
        scales = (0.25, 2.0) if fp8 else (1.0, 1.0)
        reference.kv_write(key, value, expected, slots, *scales)
        kv_write(key, value, cache, slots, *scales)
        torch.testing.assert_close(cache, expected, atol=0, rtol=0, equal_nan=True)

    run()
