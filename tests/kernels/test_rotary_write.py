"""The kernel between projection and attention: what it replaces are norms of heads, rotary positions, and writing."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ragged import DTYPES, TOLERANCES

from rustvllm.kernels import kv_write, norm, reference, rotary
from rustvllm.kernels.rotary_write import rotary_write

few = settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def make(device, dtype, seed, tokens, heads, kv_heads, head_dim, num_pairs, *, fp8, norms):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    slots = torch.randperm(tokens + 3, generator=generator)[:tokens].int() - 1  # one may be −1
    shape = (2, tokens + 2, 1, kv_heads, head_dim)
    caches = [torch.zeros(shape, dtype=torch.uint8 if fp8 else dtype, device=device) for _ in range(2)]
    positions = torch.randint(0, 40, (tokens,), generator=generator).int().to(device)
    weights = (random(head_dim), random(head_dim)) if norms else None
    given = (random(tokens, heads + 2 * kv_heads, head_dim), heads, positions, random(40, 2 * num_pairs))
    return given, caches, slots.to(device), weights


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_its_reference(device, dtype):
    @few
    @given(
        st.integers(1, 4),
        st.sampled_from([(4, 2, 16, 8), (3, 3, 12, 6), (5, 1, 20, 4), (2, 1, 8, 1)]),
        st.booleans(),
        st.sampled_from([None, 0.0, 1.0]),
        st.integers(0, 2**31),
    )
    def run(tokens, sizes, fp8, offset, seed):
        given, caches, slots, weights = make(device, dtype, seed, tokens, *sizes, fp8=fp8, norms=offset is not None)
        options = {"norm_weights": weights, "eps": 1e-6, "weight_offset": offset or 0.0}
        out = rotary_write(*given, caches[0], slots, **options)
        expected = reference.rotary_write(*given, caches[1], slots, **options)
        torch.testing.assert_close(out, expected, **TOLERANCES[dtype])
        if fp8:  # what lies between two of its numbers may be rounded to either
            read, right = (reference.decode_e4m3(cache) for cache in caches)
            torch.testing.assert_close(read, right, atol=1e-2, rtol=0.13)
        else:
            torch.testing.assert_close(*caches, **TOLERANCES[dtype])

    run()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_it_has_the_bits_of_the_kernels_that_it_replaces(device, dtype, offset):
    given, caches, slots, weights = make(device, dtype, 7, 5, 4, 2, 16, 8, fp8=False, norms=True)
    out = rotary_write(*given, caches[0], slots, norm_weights=weights, eps=1e-6, weight_offset=offset)
    qkv, heads, positions, table = given
    query, key, value = qkv.split([heads, 2, 2], 1)
    cos, sin = table[positions.long()].chunk(2, -1)
    query, key = (
        rotary.rotary(norm.rms_norm(x, weight, 1e-6, weight_offset=offset), cos, sin)
        for x, weight in zip((query, key), weights, strict=True)
    )
    kv_write.kv_write(key, value, caches[1], slots)
    tolerance = {"atol": 1e-6, "rtol": 1e-6} if dtype == torch.float32 else TOLERANCES[dtype]  # sums of another order
    torch.testing.assert_close(out, query, **tolerance)
    torch.testing.assert_close(*caches, **tolerance)
    assert torch.count_nonzero(caches[0]), "something was written"


@pytest.mark.parametrize("fp8", [False, True])
def test_projections_that_give_one_head_after_the_other(device, fp8):
    """GPT-NeoX's, whose heads are turned in part."""
    (qkv, heads, *rest), caches, slots, _ = make(device, torch.float32, 9, 4, 5, 5, 16, 2, fp8=fp8, norms=False)
    out = rotary_write(qkv, heads, *rest, caches[0], slots, is_by_head=True)
    in_order = qkv.unflatten(1, (heads, 3)).transpose(1, 2).flatten(1, 2).contiguous()
    assert torch.equal(out, rotary_write(in_order, heads, *rest, caches[1], slots))
    assert torch.equal(*caches)
    torch.testing.assert_close(out, reference.rotary_write(qkv, heads, *rest, caches[0], slots, is_by_head=True))
    assert torch.count_nonzero(caches[0]), "something was written"


def test_no_tokens_and_a_position_beyond_the_table(device):
    given, caches, slots, _ = make(device, torch.float32, 3, 2, 2, 1, 8, 4, fp8=False, norms=False)
    qkv, heads, positions, table = given
    assert rotary_write(qkv[:0], heads, positions[:0], table, caches[0], slots[:0]).shape == (0, 2, 8)
    out = rotary_write(qkv, heads, positions * 0 + 10**6, table, caches[0], slots)
    last = rotary_write(qkv, heads, positions * 0 + 39, table, caches[1], slots)
    assert torch.equal(out, last), "it reads its own memory alone"
