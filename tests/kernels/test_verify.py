"""Which drafts are kept, against request by request, and against numpy; and attention of steps with drafts."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import StaticMemory, make_step

from rustvllm.attention.metadata import KVCacheSpec
from rustvllm.attention.static_batch import StaticDraftBatch
from rustvllm.attention.triton_backend import TritonAttentionBackend
from rustvllm.kernels import reference, verify
from rustvllm.worker.drafts.rows import NO_DRAFT, DraftRows

IDS = st.integers(0, 2)  # few, so that drafts are often right
REQUESTS = st.lists(st.lists(st.tuples(IDS, st.integers(-1, 2)), max_size=9), min_size=1, max_size=40)
"""Of each token of each request: its id, and what was sampled behind it."""


def arrays_of(requests, device):
    """Sampled ids, input ids and where requests begin, in the middle of memory that holds other numbers."""
    pairs = [pair for request in requests for pair in request]
    wide = torch.full((2, len(pairs) + 3), 1, dtype=torch.int32)
    for place, (token_id, sampled) in enumerate(pairs):
        wide[0, place + 1], wide[1, place + 1] = sampled, token_id
    starts = torch.tensor(np.cumsum([0, *map(len, requests)]), dtype=torch.int32)
    wide, starts = wide.to(device), starts.to(device)
    return wide[0, 1:-2], wide[1, 1:-2], starts


@settings(max_examples=40, deadline=None, derandomize=True)
@given(REQUESTS, st.integers(0, 3), st.booleans())
def test_what_is_kept_is_that_of_one_request_after_another(device, requests, spare, in_graph):
    width = max(1, *map(len, requests)) + spare
    num_reqs = len(requests)
    results = []
    for function in (verify.verify, reference.verify):
        sampled, ids, starts = arrays_of(requests, device)
        out = torch.full((3, num_reqs * width + 2), 77, dtype=torch.int32, device=device)
        last = torch.full((2 * num_reqs + 1,), 77, dtype=torch.int32, device=device)
        static = {}
        if in_graph:
            rows = torch.arange(num_reqs, dtype=torch.int32, device=device).flip(0) * 2
            static = {"which": torch.full((4,), 2, dtype=torch.int32, device=device), "rows": rows}
        function(sampled, ids, starts, width, out if in_graph else out[0], last, **static)
        results.append((out.tolist(), last.tolist()))
    assert results[0] == results[1]
    out, last = results[0]
    written = out[2] if in_graph else out[0]
    assert written[num_reqs * width :] == [77, 77], "nothing is written beyond"
    assert out[1] == [77] * len(out[1])
    assert last.count(77) == len(last) - num_reqs


@pytest.mark.parametrize("seed", range(10))
def test_what_is_kept_is_what_the_host_would_keep(device, seed):
    random = np.random.default_rng(seed)
    num_drafts = random.integers(0, 5, 30)
    num_drafts[0] = 4
    requests = np.repeat(np.arange(30), 1 + num_drafts)
    depths = np.concatenate([np.arange(1 + count) for count in num_drafts])
    drafts = np.full((30, 4), NO_DRAFT, np.int64)
    for row, count in zip(drafts, num_drafts, strict=True):
        row[:count] = random.integers(0, 2, count)
    rows = DraftRows(requests, depths, drafts)
    sampled = random.integers(-1, 2, requests.size).astype(np.int32)
    out = torch.empty((30, 5), dtype=torch.int32, device=device)
    last = torch.empty(30, dtype=torch.int32, device=device)
    arrays = [torch.from_numpy(array).to(device) for array in (sampled, rows.ids, rows.starts)]
    verify.verify(*arrays, 5, out, last)
    expected = rows.accept(sampled)
    assert out.tolist() == expected.tolist()
    assert last.tolist() == [max([-1, *row[row >= 0]][-1], 0) for row in expected]
    assert (expected[:, 1:] >= 0).any(), "some were kept"


@pytest.mark.parametrize(
    ("shape", "width", "batch_invariant", "splits"),
    [
        ((4, 2, 16), 4, False, {1, 2}), ((4, 2, 16), 8, True, {1}), ((18, 1, 16), 8, False, {1}),
        ((3, 3, 5), 2, False, {1}), ((8, 1, 16), 17, False, {1}), ((4, 1, 16), 4, False, {3, 4}),
    ],
)  # fmt: skip
def test_attention_of_a_captured_step_with_drafts(device, monkeypatch, shape, width, batch_invariant, splits):
    """Of what its memory holds now: short and long requests, in one part and in several, with padding of both kinds."""
    monkeypatch.setattr("rustvllm.kernels.paged_attention.MIN_SPLIT_KEYS", 16)
    monkeypatch.setattr("rustvllm.attention.triton_backend.MIN_SPLIT_KEYS", 16)
    batches = ([(90, width), (2, 1)], [(0, width - 1)], [(5, 2), (70, 1), (33, width), (8, 1)])
    steps = [
        make_step(requests, *shape, block_size=4, dtype=torch.float32, device=device, seed=seed)
        for seed, requests in enumerate(batches)
    ]
    num_heads, num_kv_heads, head_dim = shape
    backend = TritonAttentionBackend(
        KVCacheSpec(1, num_kv_heads, head_dim), torch.float32, device, batch_invariant=batch_invariant
    )
    num_splits = set()
    for num_reqs in (4, 5):
        memory = StaticMemory(num_reqs * width, num_reqs, device)
        plan = backend.plan_static_drafts(StaticDraftBatch(4, *memory.arrays(), 110, width))
        for step in steps:
            memory.write(step)
            memory.check(plan, step, 0.3)
        num_splits |= {launch.num_splits for launch in plan._launches_for(num_heads, num_kv_heads)}
    assert device.type != "cpu" or num_splits == splits
