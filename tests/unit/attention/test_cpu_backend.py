"""Paged attention of the core against that in torch, on random ragged batches, and what it refuses."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rustvllm import _core
from rustvllm.attention.cpu_backend import CPUAttentionBackend
from rustvllm.attention.metadata import AttentionMetadata, KVCacheSpec, visible_counts
from rustvllm.attention.selector import make_attention_backend
from rustvllm.attention.torch_backend import TorchAttentionBackend

REQUESTS = st.lists(st.tuples(st.integers(0, 140), st.integers(1, 70)), min_size=1, max_size=6)  # (computed, new)


def make_step(requests, num_heads, num_kv_heads, head_dim, block_size, dtype, seed):
    """Metadata, query, key, value and a cache that holds what was computed, and NaN elsewhere."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    seq_lens = np.array([computed + new for computed, new in requests], np.int32)
    starts = np.concatenate(([0], np.cumsum([new for _, new in requests]))).astype(np.int32)
    num_blocks = -(-seq_lens // block_size)
    blocks = rng.permutation(int(num_blocks.sum()) + 3) + 1  # scattered; block 0 is the null block
    table = np.full((len(requests), int(num_blocks.max()) + 2), 10**6, np.int32)  # what is stale must not be read
    cache = torch.full(KVCacheSpec(1, num_kv_heads, head_dim).layer_shape(len(blocks) + 1, block_size), torch.nan)
    cache[:, 0] = 0
    flat, slot_mapping, taken = cache.view(2, -1, num_kv_heads, head_dim), [], 0
    for row, (computed, new) in enumerate(requests):
        table[row, : num_blocks[row]] = blocks[taken : taken + num_blocks[row]]
        taken += int(num_blocks[row])
        positions = np.arange(computed + new)
        slots = table[row, positions // block_size].astype(np.int64) * block_size + positions % block_size
        flat[:, slots[:computed]] = torch.randn(2, computed, num_kv_heads, head_dim, generator=generator)
        slot_mapping += slots[computed:].tolist()
    num_tokens = int(starts[-1])
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, generator=generator).to(dtype)
    query, key, value = qkv.split([num_heads, num_kv_heads, num_kv_heads], 1)  # as models give them: not contiguous
    slots = torch.tensor(slot_mapping, dtype=torch.int32)
    metadata = AttentionMetadata(block_size, torch.from_numpy(table), slots, starts, seq_lens)
    return metadata, query, key, value, cache.to(dtype)


def some_images(metadata):
    """Images of 30 tokens at positions 10, 50, 90 and so on, where they fit into the sequences."""
    visible = visible_counts(metadata.query_start_loc, metadata.seq_lens, np.empty(0, np.int64), np.empty(0, np.int32))
    ends = (visible - 11) // 40 * 40 + 40
    lens = np.repeat(metadata.seq_lens, np.diff(metadata.query_start_loc))
    return np.where((visible > 10) & (visible <= ends) & (ends <= lens), ends, visible).astype(np.int32)


@given(
    REQUESTS,
    st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    st.sampled_from([1, 3, 16]),
    st.sampled_from([4, 8, 16, 40, 64]),
    st.integers(1, 3),
    st.sampled_from([None, 1, 5, 63, 64, 100, 2**31 - 1]),
    st.sampled_from([None, 0.5, 3.0]),
    st.booleans(),
    st.sampled_from([None, torch.float32, torch.bfloat16]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_equals_torch(requests, heads, block_size, head_dim, num_threads, window, cap, sloped, sinks, images, seed):
    slopes = [2.0 ** -(1 + head) for head in range(heads[0])] if sloped else None
    sinks = None if sinks is None else torch.linspace(-3, 4, heads[0]).to(sinks)
    options = {"sliding_window": window, "soft_cap": cap, "alibi_slopes": slopes, "sinks": sinks}
    metadata, query, key, value, cache = make_step(requests, *heads, head_dim, block_size, torch.float32, seed)
    if images:
        metadata = replace(metadata, visible=some_images(metadata))
    expected_cache = cache.clone()
    oracle = TorchAttentionBackend(KVCacheSpec(1, heads[1], head_dim), torch.float32)
    expected = oracle.plan(metadata).forward(query, key, value, expected_cache, head_dim**-0.5, **options)
    plan = CPUAttentionBackend(num_threads).plan(metadata)
    out = plan.forward(query, key, value, cache, head_dim**-0.5, **options)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache, expected_cache, atol=0, rtol=0, equal_nan=True)


@given(REQUESTS, st.sampled_from([(4, 4), (4, 2)]), st.sampled_from([5, 16, 64]), st.integers(0, 2**31))
def test_bfloat16_is_within_its_rounding_of_float32(requests, heads, head_dim, seed):
    metadata, query, key, value, cache = make_step(requests, *heads, head_dim, 16, torch.bfloat16, seed)
    oracle = TorchAttentionBackend(KVCacheSpec(1, heads[1], head_dim), torch.float32)
    expected = oracle.plan(metadata).forward(query.float(), key.float(), value.float(), cache.float(), 0.2)
    out = CPUAttentionBackend(1).plan(metadata).forward(query, key, value, cache, 0.2)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, atol=1e-5, rtol=2**-8)


@given(
    REQUESTS,
    st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    st.sampled_from([5, 16, 64]),
    st.sampled_from([None, 7, 100]),
    st.integers(0, 2**31),
)
def test_queries_of_float32_over_a_cache_of_bfloat16(requests, heads, head_dim, window, seed):
    metadata, query, key, value, cache = make_step(requests, *heads, head_dim, 16, torch.float32, seed)
    narrow = cache.bfloat16()
    rounded = narrow.float()
    oracle = TorchAttentionBackend(KVCacheSpec(1, heads[1], head_dim), torch.float32)
    kept = (key.bfloat16().float(), value.bfloat16().float())
    expected = oracle.plan(metadata).forward(query, *kept, rounded, 0.2, sliding_window=window)
    out = CPUAttentionBackend(2).plan(metadata).forward(query, key, value, narrow, 0.2, sliding_window=window)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(narrow.float(), rounded, atol=0, rtol=0, equal_nan=True)


def in_int8(heads):
    """Heads as a cache of int8 holds them, written with torch: whole numbers, and the scale behind them."""
    largest = heads.abs().amax(-1, keepdim=True)
    scales, factors = largest / 127, torch.tensor(127.0) / largest
    numbers = (heads * factors).round().nan_to_num(0).to(torch.int8)
    return torch.cat((numbers, scales.contiguous().view(torch.int8)), -1)


def out_of_int8(kept):
    """What they stand for, in float32."""
    return kept[..., :-4].float() * kept[..., -4:].clone(memory_format=torch.contiguous_format).view(torch.float32)


@given(
    REQUESTS,
    st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    st.sampled_from([5, 16, 64]),
    st.sampled_from([None, 7, 100]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 2**31),
)
def test_a_cache_of_int8(requests, heads, head_dim, window, dtype, seed):
    metadata, query, key, value, cache = make_step(requests, *heads, head_dim, 16, torch.float32, seed)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    kept = in_int8(cache)
    rounded = out_of_int8(kept)
    oracle = TorchAttentionBackend(KVCacheSpec(1, heads[1], head_dim), torch.float32)
    of_step = (out_of_int8(in_int8(new.float())) for new in (key, value))
    expected = oracle.plan(metadata).forward(query.float(), *of_step, rounded, 0.2, sliding_window=window)
    out = CPUAttentionBackend(2).plan(metadata).forward(query, key, value, kept, 0.2, sliding_window=window)
    assert out.dtype == dtype
    rtol = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(out.float(), expected, atol=1e-5, rtol=rtol)
    torch.testing.assert_close(out_of_int8(kept), rounded, atol=0, rtol=0, equal_nan=True)


def test_heads_of_int8_without_room_for_their_scale_are_refused():
    metadata, query, key, value, cache = make_step([(5, 2)], 2, 2, 8, 4, torch.float32, 0)
    plan = CPUAttentionBackend(1).plan(metadata)
    with pytest.raises(ValueError, match="kv_cache has heads of 3 bytes, but 4 are a scale"):
        plan.forward(query, key, value, cache[..., :3].contiguous().to(torch.int8), 0.3)
    with pytest.raises(
        ValueError, match=r"query has the shape \[2, 2, 8\], but the step and the cache need \[2, 2, 4\]"
    ):
        plan.forward(query, key, value, cache.to(torch.int8), 0.3)


def test_a_cache_of_float32_meets_no_queries_of_bfloat16():
    metadata, query, key, value, cache = make_step([(5, 2)], 2, 2, 8, 4, torch.bfloat16, 0)
    plan = CPUAttentionBackend(1).plan(metadata)
    with pytest.raises(TypeError, match="kv_cache must be an array of float32, or of bfloat16 seen as uint16, as all"):
        plan.forward(query, key, value, cache.float(), 0.3)


def test_much_work_on_several_threads_has_the_bits_of_one():
    step = make_step([(0, 300), (200, 1), (100, 90)], 8, 4, 64, 16, torch.float32, 3)
    outs = []
    for num_threads in (1, 3):
        metadata, query, key, value, cache = (part.clone() if torch.is_tensor(part) else part for part in step)
        outs.append(CPUAttentionBackend(num_threads).plan(metadata).forward(query, key, value, cache, 0.1))
    assert torch.equal(*outs)
    assert not outs[0].isnan().any()


def test_a_token_that_is_not_kept():
    metadata, query, key, value, cache = make_step([(5, 2)], 2, 2, 8, 4, torch.float32, 0)
    padded = AttentionMetadata(
        4, metadata.block_table, torch.nn.functional.pad(metadata.slot_mapping, (0, 1), value=-1),
        metadata.query_start_loc, metadata.seq_lens, has_padding=True,
    )  # fmt: skip
    query, key, value = (torch.cat((x, torch.full_like(x[:1], 7.0))) for x in (query, key, value))
    out = CPUAttentionBackend(1).plan(padded).forward(query, key, value, cache, 0.3)
    assert torch.equal(out[2], torch.zeros(2, 8))
    assert not (cache == 7.0).any()


@pytest.fixture
def step():
    """A plan and the arrays of its layer, all good."""
    metadata, query, key, value, cache = make_step([(5, 2), (0, 1)], 4, 2, 8, 4, torch.float32, 0)
    arrays = {"query": query, "key": key, "value": value, "kv_cache": cache, "out": torch.full((3, 4, 8), 7.0)}
    return CPUAttentionBackend(1).plan(metadata).core, {name: array.numpy() for name, array in arrays.items()}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("query", lambda a: a[:2], r"query has the shape \[2, 4, 8\], but the step and the cache need \[3, 4, 8\]"),
        ("query", lambda a: a[0], "query has 2 dimensions"),
        ("query", lambda a: a[:, :3], r"out has the shape"),
        ("query", lambda a: np.concatenate((a, a), 2)[:, :, ::2], "the heads of a token must be contiguous"),
        ("query", lambda a: a[::-1], "must follow each other without overlap"),
        ("query", lambda a: np.broadcast_to(a[:1], a.shape), "must follow each other without overlap"),
        ("key", lambda a: a[:, :1], "key has the shape"),
        ("value", lambda a: np.swapaxes(a.copy(), 1, 2), "value has the shape"),
        ("kv_cache", lambda a: a[:, :2].copy(), "the batch names block"),
        ("kv_cache", lambda a: a[:1], "its first dimension must be 2"),
        ("kv_cache", lambda a: np.concatenate((a, a), 4)[..., :8], "kv_cache must be C-contiguous"),
        ("kv_cache", lambda a: np.concatenate((a, a), 2), "blocks of 4 tokens, but the cache has blocks of 8"),
        ("out", lambda a: np.concatenate((a, a))[::2], "out must be C-contiguous"),
        ("out", lambda a: np.broadcast_to(a, a.shape), "out must be writable"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(step, name, change, message):
    plan, arrays = step
    with pytest.raises(ValueError, match=message):
        plan.forward(**(arrays | {name: change(arrays[name])}), scale=0.3)
    assert (arrays["out"] == 7).all()
    plan.forward(**arrays, scale=0.3)
    assert (arrays["out"] != 7).any()


def test_heads_that_cannot_be_shared_are_refused(step):
    plan, arrays = step
    for name in ("query", "out"):
        arrays[name] = np.ascontiguousarray(arrays[name][:, :3])
    with pytest.raises(ValueError, match="num_heads is 3, but it must be a multiple of num_kv_heads, 2"):
        plan.forward(**arrays, scale=0.3)


def test_arrays_that_share_memory_are_refused(step):
    plan, arrays = step
    arrays["query"] = arrays["out"]
    with pytest.raises(ValueError, match="query and out share memory"):
        plan.forward(**arrays, scale=0.3)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32, ">f4"])
def test_other_dtypes_are_refused(step, dtype):
    plan, arrays = step
    with pytest.raises(TypeError, match="query must be an array of float32"):
        plan.forward(**{name: np.zeros(array.shape, dtype) for name, array in arrays.items()}, scale=0.3)
    with pytest.raises(TypeError, match="value must be an array of float32"):
        plan.forward(**(arrays | {"value": arrays["value"].astype(dtype)}), scale=0.3)


@pytest.mark.parametrize(("option", "value"), [("sliding_window", 0), ("soft_cap", 0.0), ("soft_cap", float("nan"))])
def test_options_that_mean_nothing_are_refused(step, option, value):
    plan, arrays = step
    with pytest.raises(ValueError, match=f"{option} is"):
        plan.forward(**arrays, scale=0.3, **{option: value})


def test_sinks_of_other_heads_are_refused(step):
    plan, arrays = step
    with pytest.raises(ValueError, match="sinks has 3 elements, but the batch and the cache need 4"):
        plan.forward(**arrays, scale=0.3, sinks=[0.0, 1.0, 2.0])
    assert (arrays["out"] == 7).all()


def test_a_window_of_one_sees_itself_alone(step):
    plan, arrays = step
    plan.forward(**arrays, scale=0.3, sliding_window=1)
    np.testing.assert_allclose(arrays["out"], np.repeat(arrays["value"], 2, axis=1), rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_lens": np.array([40, 1], np.int32)}, r"seq_lens\[0\] is 40, but it must lie between 2"),
        ({"seq_lens": np.array([7], np.int32)}, "block_table has 2 rows, but seq_lens has 1"),
        ({"query_start_loc": np.array([0, 2, 4], np.int32)}, r"query_start_loc\[2\] is 4"),
        ({"slot_mapping": np.array([-2, 1, 2], np.int32)}, r"slot_mapping\[0\] is -2"),
        ({"block_size": 0}, "block_size is 0"),
        ({"visible": np.array([6, 7, 2], np.int32)}, r"visible\[2\] is 2, but it must lie between 1 and 1"),
        ({"visible": np.array([7, 6, 1], np.int32)}, r"visible\[1\] is 6, but it must lie between 7 and 7"),
        ({"visible": np.array([7, 7], np.int32)}, "visible has 2 elements, but 3 are expected"),
        ({"block_table": np.zeros(4, np.int32)}, "block_table has 1 dimensions"),
        ({"block_table": -np.ones((2, 4), np.int32)}, r"block_table\[0, 0\] is -1"),
    ],
)
def test_steps_that_cannot_be_are_refused(change, message):
    good = {
        "block_size": 4,
        "query_start_loc": np.array([0, 2, 3], np.int32),
        "seq_lens": np.array([7, 1], np.int32),
        "block_table": np.ones((2, 4), np.int32),
        "slot_mapping": np.arange(3, dtype=np.int32),
    }
    attention = _core.CpuAttention(1)
    attention.plan(**good)
    with pytest.raises(ValueError, match=message):
        attention.plan(**(good | change))
    with pytest.raises(TypeError, match="seq_lens must be an array of int32"):
        attention.plan(**(good | {"seq_lens": good["seq_lens"].astype(np.int64)}))


@pytest.mark.parametrize("num_threads", [0, 1025])
def test_a_wrong_number_of_threads(num_threads):
    with pytest.raises(ValueError, match=f"num_threads is {num_threads}, but it must lie between 1 and 1024"):
        CPUAttentionBackend(num_threads)
    assert _core.CpuAttention(2).num_threads == 2


@pytest.mark.parametrize(
    ("name", "dtype", "device", "expected"),
    [
        ("auto", torch.float32, "cpu", "cpu"),
        ("auto", torch.bfloat16, "cpu", "cpu"),
        ("auto", torch.float16, "cpu", "torch"),
        ("torch", torch.float32, "cpu", "torch"),
        ("cpu", torch.float32, "cpu", "cpu"),
    ],
)
def test_which_backend(name, dtype, device, expected):
    backend = make_attention_backend(name, KVCacheSpec(1, 2, 8), dtype, torch.device(device), 1)
    assert backend.name == expected
