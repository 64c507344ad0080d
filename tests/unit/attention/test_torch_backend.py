"""Paged attention in torch against a loop over tokens and heads in float64, on random ragged batches."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rustvllm.attention.metadata import AttentionMetadata, KVCacheSpec
from rustvllm.attention.torch_backend import TorchAttentionBackend


def naive_attention(
    query, keys, values, scale, *, visible=None, sliding_window=None, soft_cap=None, alibi_slopes=None, sinks=None
):
    """One request: ``[n, H, D]`` queries, the last ones of ``[s, KVH, D]`` keys and values."""
    n, num_heads, _ = query.shape
    seq_len, num_kv_heads, _ = keys.shape
    out = torch.zeros_like(query, dtype=torch.float64)
    for i in range(n):
        position = seq_len - n + i
        end = position + 1 if visible is None else int(visible[i])
        seen = slice(0 if sliding_window is None else max(0, position - sliding_window + 1), end)
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            scores = keys[seen, kv_head].double() @ query[i, head].double() * scale
            if soft_cap is not None:
                scores = soft_cap * (scores / soft_cap).tanh()
            if alibi_slopes is not None:
                scores += alibi_slopes[head] * (torch.arange(seen.start, seen.stop) - position)
            weights = scores.exp() / (scores.exp().sum() + (0 if sinks is None else sinks[head].double().exp()))
            out[i, head] = weights @ values[seen, kv_head].double()
    return out


def draw_visible(requests, rng):
    """``AttentionMetadata.visible`` with images here and there, in which a step may begin."""
    parts = []
    for computed, new in requests:
        ends, place = np.arange(1, computed + new + 1, dtype=np.int32), 0
        while (first := place + rng.integers(0, 8)) + (length := rng.integers(1, 12)) <= ends.size:
            place = first + length
            ends[first:place] = place
        parts.append(ends[computed:])
    return np.concatenate(parts)


def draw_options(num_heads, window, cap, sloped, has_sinks):
    """Keyword arguments of a layer; None and False leave one out."""
    slopes = [2.0 ** -(1 + head) for head in range(num_heads)] if sloped else None
    sinks = torch.tensor([1.5, -2.0, 0.25, 4.0, -0.5, 3.0][:num_heads]) if has_sinks else None
    return {"sliding_window": window, "soft_cap": cap, "alibi_slopes": slopes, "sinks": sinks}


WINDOWS = st.sampled_from([None, 1, 2, 5, 16, 10**6])
CAPS = st.sampled_from([None, 0.5, 3.0])
REQUESTS = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=8)  # (computed, new)


@given(
    REQUESTS,
    st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    st.sampled_from([1, 3, 16]),
    st.sampled_from([64, 1000, 1 << 20]),
    st.integers(0, 2**31),
    st.booleans(),
    WINDOWS,
    CAPS,
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_equals_the_loop(requests, heads, block_size, max_bytes, seed, padded, window, cap, sloped, has_sinks, images):
    rng = np.random.default_rng(seed)
    num_heads, num_kv_heads = heads
    head_dim = 4
    options = draw_options(num_heads, window, cap, sloped, has_sinks)
    seq_lens = np.array([computed + new for computed, new in requests], np.int32)
    starts = np.concatenate(([0], np.cumsum([new for _, new in requests]))).astype(np.int32)
    num_blocks = [-(-int(n) // block_size) for n in seq_lens]
    blocks = rng.permutation(sum(num_blocks) + 3) + 1  # scattered; block 0 is the null block
    table = np.full((len(requests), max(num_blocks) + 2), 10**6, np.int32)  # what is stale must not be read
    cache = torch.full(KVCacheSpec(1, num_kv_heads, head_dim).layer_shape(len(blocks) + 1, block_size), torch.nan)
    cache[:, 0] = 0
    flat = cache.view(2, -1, num_kv_heads, head_dim)
    slot_mapping, keys, values, taken = [], [], [], 0
    for row, (computed, new) in enumerate(requests):
        table[row, : num_blocks[row]] = blocks[taken : taken + num_blocks[row]]
        taken += num_blocks[row]
        k, v = torch.randn(
            2, computed + new, num_kv_heads, head_dim, generator=torch.Generator().manual_seed(seed + row)
        )
        slots = [int(table[row, p // block_size]) * block_size + p % block_size for p in range(computed + new)]
        flat[0, slots[:computed]], flat[1, slots[:computed]] = k[:computed], v[:computed]
        slot_mapping += slots[computed:]
        keys.append(k)
        values.append(v)
    new_keys = torch.cat([k[computed:] for k, (computed, _) in zip(keys, requests, strict=True)])
    new_values = torch.cat([v[computed:] for v, (computed, _) in zip(values, requests, strict=True)])
    query = torch.randn(int(starts[-1]), num_heads, head_dim, generator=torch.Generator().manual_seed(seed))
    if padded:  # a token that is not kept
        slot_mapping.append(-1)
        new_keys, new_values, query = (
            torch.cat((x, torch.full_like(x[:1], 7.0))) for x in (new_keys, new_values, query)
        )
    before = cache.clone()
    visible = draw_visible(requests, rng) if images else None

    backend = TorchAttentionBackend(
        KVCacheSpec(1, num_kv_heads, head_dim), torch.float32, max_gather_bytes=max_bytes, max_mask_elements=max_bytes
    )
    plan = backend.plan(
        AttentionMetadata(
            block_size,
            torch.from_numpy(table),
            torch.tensor(slot_mapping, dtype=torch.int32),
            starts,
            seq_lens,
            padded,
            visible=None if visible is None else np.concatenate((visible, np.zeros(int(padded), np.int32))),
        )
    )
    out = plan.forward(query, new_keys, new_values, cache, 0.37, **options)

    for row in range(len(requests)):
        span = slice(int(starts[row]), int(starts[row + 1]))
        seen = None if visible is None else visible[span]
        expected = naive_attention(query[span], keys[row], values[row], 0.37, visible=seen, **options)
        torch.testing.assert_close(out[span].double(), expected, atol=1e-5, rtol=1e-5)
    written = torch.tensor([slot for slot in slot_mapping if slot >= 0])
    assert torch.equal(flat[:, written], torch.stack((new_keys, new_values))[:, : len(written)])
    others = torch.ones(flat.shape[1], dtype=torch.bool)
    others[written] = False
    assert torch.equal(flat[:, others].nan_to_num(7.5), before.view_as(flat)[:, others].nan_to_num(7.5))


@pytest.mark.parametrize("max_bytes", [1, 1 << 20])
def test_the_bound_on_gathered_bytes_holds(max_bytes):
    spec = KVCacheSpec(1, 2, 4)
    backend = TorchAttentionBackend(spec, torch.float32, max_gather_bytes=max_bytes)
    lens = np.array([5, 90, 17, 33, 1, 64], np.int32)
    table = torch.zeros(6, 6, dtype=torch.int32)
    starts = np.arange(7, dtype=np.int32)
    plan = backend.plan(AttentionMetadata(16, table, torch.zeros(6, dtype=torch.int32), starts, lens))
    bytes_per_slot = 2 * 2 * 4 * 4
    if max_bytes == 1:
        assert sorted(int(t) for chunk in plan._decode for t in chunk.tokens) == list(range(6))
    else:
        assert plan._decode[0].tokens is None, "the whole batch in its own order"
    for chunk in plan._decode:
        assert len(chunk.slots) == 1 or chunk.slots.numel() * bytes_per_slot <= max_bytes
    assert len(plan._decode) == (6 if max_bytes == 1 else 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sliding_window": 0}, "sliding_window is 0, but must be at least 1"),
        ({"sliding_window": -3}, "sliding_window is -3"),
        ({"soft_cap": 0.0}, "soft_cap is 0.0, but it must be a number above 0"),
        ({"soft_cap": float("inf")}, "soft_cap is inf"),
        ({"alibi_slopes": [0.5]}, "alibi_slopes has length 1, expected 2"),
        ({"sinks": torch.zeros(3)}, r"sinks has the shape \[3\], expected \[2\]"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    table, slots = torch.ones(1, 1, dtype=torch.int32), torch.full((1,), 16, dtype=torch.int32)
    starts, lens = np.array([0, 1], np.int32), np.array([1], np.int32)
    plan = TorchAttentionBackend(KVCacheSpec(1, 2, 4), torch.float32).plan(
        AttentionMetadata(16, table, slots, starts, lens)
    )
    query, cache = torch.ones(1, 2, 4), torch.zeros(2, 2, 16, 2, 4)
    with pytest.raises(ValueError, match=message):
        plan.forward(query, query, query, cache, 1.0, **options)
    assert not cache.any(), "nothing was written"
    torch.testing.assert_close(plan.forward(query, query, query, cache, 1.0, soft_cap=2.0), query)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_within_its_rounding_of_float64(dtype):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(9, 4, 8, generator=generator).to(dtype)
    keys, values = torch.randn(2, 9, 2, 8, generator=generator).to(dtype)
    starts, lens = np.array([0, 9], np.int32), np.array([9], np.int32)
    metadata = AttentionMetadata(
        16, torch.ones(1, 1, dtype=torch.int32), torch.arange(16, 25, dtype=torch.int32), starts, lens
    )
    options = draw_options(4, 5, 3.0, True, True)
    cache = torch.zeros(2, 2, 16, 2, 8, dtype=dtype)
    out = TorchAttentionBackend(KVCacheSpec(1, 2, 8), dtype).plan(metadata)
    out = out.forward(query, keys, values, cache, 0.37, **options)
    assert out.dtype == dtype
    expected = naive_attention(query, keys, values, 0.37, **options)
    torch.testing.assert_close(out.double(), expected, atol=4 * torch.finfo(dtype).eps, rtol=0)
