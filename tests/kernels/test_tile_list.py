"""Tiles that the device works out, against a plain loop, and attention over them against attention that was planned."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import StaticMemory, make_step

from rustvllm.attention.metadata import KVCacheSpec
from rustvllm.attention.static_batch import StaticMixedBatch
from rustvllm.attention.triton_backend import TritonAttentionBackend
from rustvllm.kernels.tile_list import list_decodes, list_tiles, num_tiles


def starts_of(lengths, device):
    """Where requests begin, with one more that is empty."""
    return torch.tensor([0, *torch.tensor([*lengths, 0]).cumsum(0).tolist()], dtype=torch.int32, device=device)


def expected_tiles(lengths, tile_tokens, *, skip_decodes):
    return {
        (request, first)
        for request, length in enumerate(lengths)
        if not (skip_decodes and length == 1)
        for first in range(0, length, tile_tokens)
    }


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 1, 2, 5, 16, 17, 130]), min_size=1, max_size=70),
    st.sampled_from([1, 3, 16]),
    st.booleans(),
    st.integers(0, 3),
)
def test_tiles_are_those_of_a_plain_loop(device, lengths, tile_tokens, skip_decodes, padding):
    starts = starts_of([*lengths, *[0] * padding], device)
    num_requests = starts.shape[0] - 1
    room = num_tiles(sum(lengths), num_requests, tile_tokens)
    requests, first_tokens = torch.full((2, room), 99, dtype=torch.int32, device=device)
    list_tiles(requests, first_tokens, starts, tile_tokens, skip_decodes=skip_decodes)
    found = list(zip(requests.tolist(), first_tokens.tolist(), strict=True))
    work = [tile for tile in found if tile[0] != num_requests - 1]
    assert len(work) == len(set(work))
    assert set(work) == expected_tiles(lengths, tile_tokens, skip_decodes=skip_decodes)
    assert {tile for tile in found if tile[0] == num_requests - 1} <= {(num_requests - 1, 0)}
    requests, first_tokens = torch.full((2, num_requests), 99, dtype=torch.int32, device=device)
    list_decodes(requests, first_tokens, starts)
    own = [index if length == 1 else num_requests - 1 for index, length in enumerate([*lengths, *[0] * padding, 0])]
    assert requests.tolist() == own
    assert not first_tokens.any()


@pytest.mark.parametrize(
    ("shape", "batch_invariant"), [((4, 2, 16), False), ((4, 2, 16), True), ((18, 1, 16), False), ((3, 3, 5), False)]
)
def test_a_mixed_plan_computes_what_its_memory_holds_now(device, monkeypatch, shape, batch_invariant):
    monkeypatch.setattr("rustvllm.kernels.paged_attention.MIN_SPLIT_KEYS", 16)
    monkeypatch.setattr("rustvllm.attention.triton_backend.MIN_SPLIT_KEYS", 16)
    batches = ([(90, 1), (2, 19), (0, 7)], [(0, 3)], [(5, 20), (70, 1), (13, 9), (8, 1)])
    steps = [
        make_step(requests, *shape, block_size=4, dtype=torch.float32, device=device, seed=seed)
        for seed, requests in enumerate(batches)
    ]
    _, num_kv_heads, head_dim = shape
    backend = TritonAttentionBackend(
        KVCacheSpec(1, num_kv_heads, head_dim), torch.float32, device, batch_invariant=batch_invariant
    )
    memory = StaticMemory(40, 6, device)
    plan = backend.plan_static_mixed(StaticMixedBatch(4, *memory.arrays(), max_seq_len=100))
    for step in steps:
        memory.write(step)
        plan.begin_step()
        memory.check(plan, step, 0.3)
