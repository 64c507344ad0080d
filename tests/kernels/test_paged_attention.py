"""The Triton attention backend against a plain reference in float64, on ragged batches in caches full of NaN."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import DTYPES, TOLERANCES, make_step

from rustvllm.attention.metadata import AttentionMetadata, KVCacheSpec
from rustvllm.attention.static_batch import StaticAttentionBackend, StaticDecodeBatch
from rustvllm.attention.triton_backend import TritonAttentionBackend
from rustvllm.kernels import paged_attention

REQUESTS = st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 2, 7, 19])), min_size=1, max_size=4)
SHAPES = [(1, 1, 8), (4, 2, 16), (6, 2, 24), (3, 3, 5), (18, 1, 16), (2, 1, 72)]  # heads of queries, of keys, head size
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "sliding_window": st.sampled_from([1, 3, 17, 30]),
        "soft_cap": st.sampled_from([0.5, 20.0]),
        "alibi_slopes": st.just("slopes"),
        "sinks": st.just("sinks"),
    },
)


@pytest.fixture
def few_keys_are_split(monkeypatch):
    """Keys of a part at least: so few that the sequences of these tests are split."""
    monkeypatch.setattr(paged_attention, "MIN_SPLIT_KEYS", 16)
    monkeypatch.setattr("rustvllm.attention.triton_backend.MIN_SPLIT_KEYS", 16)


def draw_options(options, num_heads):
    if "alibi_slopes" in options:
        options = options | {"alibi_slopes": [2.0 ** -(1 + i % 4) for i in range(num_heads)]}
    if "sinks" in options:
        options = options | {"sinks": torch.tensor([(2.0, -3.0, 0.5, 30.0)[i % 4] for i in range(num_heads)])}
    return options


def make_backend(step, device, **kwargs):
    num_kv_heads, head_dim = step.key.shape[1:]
    return TritonAttentionBackend(KVCacheSpec(1, num_kv_heads, head_dim), step.query.dtype, device, **kwargs)


def check(step, plan, scale, **options):
    expected, expected_cache = step.expected(scale, **options)
    cache = step.cache.clone()
    out = plan.forward(step.query, step.key, step.value, cache, scale, **options)
    torch.testing.assert_close(out, expected, **TOLERANCES[out.dtype])
    torch.testing.assert_close(cache, expected_cache, atol=0, rtol=0, equal_nan=True)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("few_keys_are_split")
def test_ragged_batches(dtype, device):
    @settings(max_examples=12, derandomize=True, deadline=None)
    @given(
        REQUESTS,
        st.sampled_from(SHAPES),
        st.sampled_from([1, 3, 16, 32]),
        OPTIONS,
        st.booleans(),
        st.booleans(),
        st.integers(0, 1),
        st.integers(0, 2**31),
    )
    def run(requests, shape, block_size, options, fp8, batch_invariant, padding, seed):
        step = make_step(
            requests, *shape, block_size=block_size, dtype=dtype, device=device, seed=seed, fp8=fp8, padding=padding
        )
        backend = make_backend(step, device, batch_invariant=batch_invariant)
        check(step, backend.plan(step.metadata), 0.3, **draw_options(options, shape[0]))

    run()


@pytest.mark.usefixtures("few_keys_are_split")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fp8", [False, True])
def test_long_decodes_are_split(dtype, fp8, device):
    requests = [(150, 1), (3, 1), (0, 1), (70, 1)]
    step = make_step(requests, 2, 1, 16, block_size=8, dtype=dtype, device=device, seed=1, fp8=fp8)
    backend = make_backend(step, device)
    plan = backend.plan(step.metadata)
    check(step, plan, 0.3)
    assert [launch.num_splits > 1 for launch in plan._launches_for(2, 1)] == [True]
    check(step, plan, 0.3, sliding_window=60)
    check(step, plan, 0.3, sinks=torch.tensor([1.5, -2.0], device=device))


@pytest.mark.usefixtures("few_keys_are_split")
def test_decodes_in_one_step_with_a_prompt_are_split_and_it_is_not(device):
    step = make_step([(0, 20), (150, 1), (9, 1)], 2, 1, 16, block_size=8, dtype=torch.float32, device=device, seed=2)
    plan = make_backend(step, device).plan(step.metadata)
    check(step, plan, 0.3, soft_cap=2.0)
    prompt, decodes = plan._launches_for(2, 1)
    assert (prompt.num_splits, decodes.tiles.requests.tolist()) == (1, [1, 2])
    assert decodes.num_splits > 1


@pytest.mark.usefixtures("few_keys_are_split", "rows_alike")
@pytest.mark.parametrize("window", [None, 20])
def test_batch_invariant_bits_do_not_depend_on_company_or_on_how_a_prompt_was_cut(device, window):
    whole = make_step([(0, 45), (30, 6), (80, 1)], 4, 2, 16, block_size=4, dtype=torch.float32, device=device, seed=3)
    backend = make_backend(whole, device, batch_invariant=True)
    cache = whole.cache.clone()
    together = backend.plan(whole.metadata).forward(
        whole.query, whole.key, whole.value, cache, 0.3, sliding_window=window
    )
    metadata = whole.metadata
    for request, pieces in enumerate(([13, 1, 31], [5, 1], [1])):
        start, computed = int(metadata.query_start_loc[request]), int(metadata.seq_lens[request]) - sum(pieces)
        cache = whole.cache.clone()
        for piece in pieces:
            computed += piece
            span = slice(start, start + piece)
            alone = AttentionMetadata(
                metadata.block_size,
                metadata.block_table[request : request + 1],
                metadata.slot_mapping[span],
                np.array([0, piece], np.int32),
                np.array([computed], np.int32),
            )
            part = backend.plan(alone).forward(
                whole.query[span], whole.key[span], whole.value[span], cache, 0.3, sliding_window=window
            )
            assert torch.equal(part, together[span]), (request, piece)
            start += piece


@pytest.mark.usefixtures("few_keys_are_split")
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_static_plan_computes_what_its_memory_holds_now(device, batch_invariant):
    num_rows, block_size = 4, 4
    steps = [
        make_step(requests, 4, 2, 16, block_size=block_size, dtype=torch.float32, device=device, seed=seed)
        for seed, requests in enumerate(([(90, 1), (2, 1), (40, 1)], [(0, 1), (61, 1), (7, 1), (20, 1)]))
    ]
    backend = make_backend(steps[0], device, batch_invariant=batch_invariant)
    assert isinstance(backend, StaticAttentionBackend)
    table = torch.zeros(6, 30, dtype=torch.int32, device=device)
    slots = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
    lens = torch.ones(num_rows, dtype=torch.int32, device=device)
    rows = torch.tensor([5, 0, 3, 1], dtype=torch.int32, device=device)
    plan = backend.plan_static(StaticDecodeBatch(block_size, table, rows, slots, lens, max_seq_len=100))
    for step in steps:
        n = len(step.metadata.seq_lens)
        table.zero_()
        table[rows[:n].long(), : step.metadata.block_table.shape[1]] = step.metadata.block_table
        slots.fill_(-1)
        slots[:n] = step.metadata.slot_mapping
        lens.fill_(1)
        lens[:n] = torch.from_numpy(step.metadata.seq_lens)
        expected, expected_cache = step.expected(0.3)
        cache = step.cache.clone()
        padded = [torch.cat((x, x[:1].expand(num_rows - n, -1, -1))) for x in (step.query, step.key, step.value)]
        out = plan.forward(*padded, cache, 0.3)
        torch.testing.assert_close(out[:n], expected, **TOLERANCES[out.dtype])
        assert not out.isnan().any()
        torch.testing.assert_close(cache, expected_cache, atol=0, rtol=0, equal_nan=True)


def test_an_unused_row_is_zero(device):
    step = make_step([(5, 1), (9, 1)], 2, 1, 8, block_size=4, dtype=torch.float32, device=device, seed=4)
    backend = make_backend(step, device)
    lens = torch.tensor([6, 0], dtype=torch.int32, device=device)
    slots = torch.tensor([int(step.metadata.slot_mapping[0]), -1], dtype=torch.int32, device=device)
    rows = torch.arange(2, dtype=torch.int32, device=device)
    plan = backend.plan_static(StaticDecodeBatch(4, step.metadata.block_table, rows, slots, lens, max_seq_len=16))
    out = plan.forward(step.query, step.key, step.value, step.cache, 0.3)
    assert not out[0].isnan().any()
    assert (out[0] != 0).any()
    assert (out[1] == 0).all()


def test_nan_of_one_request_stays_with_it(device):
    step = make_step([(20, 1), (0, 9), (33, 1)], 2, 1, 16, block_size=4, dtype=torch.float32, device=device, seed=5)
    step.value[0] = torch.nan
    out = make_backend(step, device).plan(step.metadata).forward(
        step.query, step.key, step.value, step.cache, 0.3
    )  # fmt: skip
    assert out[0].isnan().all()
    assert not out[1:].isnan().any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"soft_cap": 0.0}, "soft_cap is 0.0"),
        ({"alibi_slopes": [0.5]}, "alibi_slopes has length 1, expected 2"),
        ({"sinks": torch.zeros(3)}, r"sinks has the shape \[3\], expected \[2\]"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message, device):
    step = make_step([(5, 2)], 2, 1, 8, block_size=4, dtype=torch.float32, device=device, seed=6)
    plan = make_backend(step, device).plan(step.metadata)
    with pytest.raises(ValueError, match=message):
        plan.forward(step.query, step.key, step.value, step.cache, 0.3, **options)
    check(step, plan, 0.3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("shape", [(8, 8, 64), (32, 8, 128), (8, 2, 256), (14, 2, 96)])
def test_large_batches_on_a_gpu(shape, fp8, dtype, device):
    requests = [(0, 700), (1500, 1), (3000, 33), (40, 1), (0, 1), (900, 1)]
    step = make_step(requests, *shape, block_size=16, dtype=dtype, device=device, seed=7, fp8=fp8)
    for options in ({}, {"sliding_window": 512}, {"soft_cap": 30.0}):
        check(step, make_backend(step, device).plan(step.metadata), shape[2] ** -0.5, **options)


@pytest.mark.gpu
def test_a_static_plan_is_captured(device):
    step = make_step([(900, 1), (30, 1)], 32, 8, 128, block_size=16, dtype=torch.bfloat16, device=device, seed=8)
    backend, lens = make_backend(step, device), torch.from_numpy(step.metadata.seq_lens).to(device)
    rows = torch.arange(2, dtype=torch.int32, device=device)
    batch = StaticDecodeBatch(16, step.metadata.block_table, rows, step.metadata.slot_mapping, lens, max_seq_len=4096)
    plan, cache = backend.plan_static(batch), step.cache.clone()
    arguments = (step.query, step.key, step.value, cache, 128**-0.5)
    expected = plan.forward(*arguments).clone()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = plan.forward(*arguments)
    cache.copy_(step.cache)
    graph.replay()
    assert torch.equal(out, expected)


def test_parts_are_put_together_by_the_last_of_them_and_counted_from_zero_again(device, few_keys_are_split):
    step = make_step([(150, 1)], 2, 1, 16, block_size=4, dtype=torch.float32, device=device, seed=3)
    backend = make_backend(step, device)
    assert backend.num_splits(1, 1, 151) > 2, "there are parts"
    for _ in range(2):
        check(step, backend.plan(step.metadata), 0.25)
        assert not backend.counters.any()


def test_parts_without_counters_are_refused(device):
    step = make_step([(30, 1)], 2, 1, 16, block_size=4, dtype=torch.float32, device=device, seed=3)
    ids = torch.zeros(2, dtype=torch.int32, device=device)
    tiles = paged_attention.Tiles(ids[:1], ids[:1], torch.arange(2, device=device).int(), ids[:1] + 31, ids[:1])
    config = make_backend(step, device).decode_config
    given = (torch.empty_like(step.query), step.query, step.cache, step.metadata.block_table, tiles, config, 0.25)
    for counters in (None, ids[:0]):
        with pytest.raises(ValueError, match="1 tiles of 1 KV heads in parts need as many counters: 0"):
            paged_attention.paged_attention(*given, num_splits=2, counters=counters)
