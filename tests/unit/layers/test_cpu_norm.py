"""Norms of the core against float64, and a model that uses them."""

import pytest
import torch
from torch import nn

from rustvllm import _core
from rustvllm.layers.cpu.norm import CoreNorm, use_core_norms
from rustvllm.layers.norm import GemmaRMSNorm, LayerNorm, RMSNorm

EPS = 1e-5


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


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def exact(norm, x):
    x, weight = x.double(), norm.weight.double()
    if isinstance(norm, LayerNorm):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * weight + norm.bias.double()
    weight = weight + 1 if isinstance(norm, GemmaRMSNorm) else weight
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm, GemmaRMSNorm])
def test_norms(threads, kind, dtype):
    norm = kind(72, EPS)
    norm.weight.copy_(random(72, seed=1))
    if kind is LayerNorm:
        norm.bias.copy_(random(72, seed=2))
    norm = norm.to(dtype)
    use_core_norms(nn.ModuleList([norm]), threads)
    assert isinstance(norm.kernel, CoreNorm)
    wide = (random(6, 3, 100) * 3 + 1).to(dtype)
    for x in (wide[:, 0, :72], wide[..., 20:92], wide[:0, 0, :72], wide[1, :1, 3:75]):
        found = norm(x)
        assert (found.dtype, found.shape) == (dtype, x.shape)
        atol, rtol = (2e-6, 1e-5) if dtype == torch.float32 else (1e-3, 2**-8)  # half a step of the dtype, and a little
        torch.testing.assert_close(found.double(), exact(norm, x), atol=atol, rtol=rtol)


def test_a_row_has_the_same_bits_in_any_company(threads):
    norm, x = CoreNorm(threads, random(300), None, EPS), random(50, 300, seed=1)
    together = norm.forward(x)
    for row in range(50):
        assert torch.equal(norm.forward(x[row : row + 1]), together[row : row + 1])


def test_half_precision_is_torchs(threads):
    norm = RMSNorm(8, EPS).to(torch.float16)
    use_core_norms(nn.ModuleList([norm]), threads)
    assert norm.kernel is None
