"""Copy lists against a naive loop over blocks, in the order out, in, copy."""

from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rustvllm.worker.block_copier import BlockCopier, zeros_on_host
from rustvllm.worker.step_buffers import StepBuffers
from rustvllm.worker.streams import make_streams

LAYERS, BLOCKS, CPU_BLOCKS, REST = 3, 12, 8, (4, 2, 3)  # block_size, KV heads, head_dim
LISTS = ("blocks_to_swap_out", "blocks_to_swap_in", "blocks_to_copy")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make(device="cpu", dtype=torch.float32, num_cpu_blocks=CPU_BLOCKS, **options):
    """A copier over caches in which every element of every block is another number."""
    count = 2 * BLOCKS * int(np.prod(REST))
    caches = [
        torch.arange(layer * count, (layer + 1) * count).view(2, BLOCKS, *REST).to(device=device, dtype=dtype)
        for layer in range(LAYERS)
    ]
    return BlockCopier(caches, num_cpu_blocks, streams=make_streams(torch.device(device)), **options)


def run(copier, swap_out=(), swap_in=(), copy=()):
    buffers = StepBuffers([(name, "int32", (16, 2)) for name in LISTS])
    for name, pairs in zip(LISTS, (swap_out, swap_in, copy), strict=True):
        buffers.arrays[name][:] = 99  # what lies behind the valid part must not matter
        if pairs:
            buffers.arrays[name][: len(pairs)] = pairs
    output = SimpleNamespace(num_swap_out=len(swap_out), num_swap_in=len(swap_in), num_copies=len(copy))
    copier.execute(output, buffers)
    for array in buffers.arrays.values():
        array[:] = 77  # the core writes its next step here


def naive(caches, cpu_caches, swap_out=(), swap_in=(), copy=()):
    for cache, cpu_cache in zip(caches, cpu_caches, strict=True):
        for block, cpu_block in swap_out:
            cpu_cache[:, cpu_block] = cache[:, block]
        for cpu_block, block in swap_in:
            cache[:, block] = cpu_cache[:, cpu_block]
        for source, target in copy:
            cache[:, target] = cache[:, source]


def check(copier, lists):
    caches = [cache.cpu().clone() for cache in copier.kv_caches]
    cpu_caches = [cache.clone() for cache in copier.cpu_caches]
    naive(caches, cpu_caches, *lists)
    run(copier, *lists)
    copier._settle()
    for got, expected in zip([*copier.kv_caches, *copier.cpu_caches], [*caches, *cpu_caches], strict=True):
        assert torch.equal(got.cpu(), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "lists",
    [
        ([], [], []),
        ([(3, 0), (1, 5), (7, 2)], [], []),
        ([], [(4, 1), (0, 9)], []),
        ([], [], [(2, 3), (2, 4), (5, 6)]),
        # Block 3 leaves and is given away at once: to what comes back, to a fork.
        ([(3, 0)], [(4, 3)], []),
        ([(3, 0), (5, 1)], [], [(2, 3), (2, 5)]),
        # Block 6 comes back and is copied at once.
        ([], [(4, 6)], [(6, 7)]),
        # All of it: 3 leaves, 4 comes back into 3, and 3 is copied into 5, which has left as well.
        ([(3, 0), (5, 1)], [(4, 3)], [(3, 5)]),
    ],
)
def test_lists_run_in_their_order(device, dtype, lists):
    copier = make(device, dtype)
    run(copier, swap_out=[(9, 4), (10, 6)])
    check(copier, lists)


def test_a_block_that_leaves_and_is_given_away_keeps_what_it_had():
    copier = make()
    first, other = (cache[:, 3].clone() for cache in copier.kv_caches[:2])
    run(copier, swap_out=[(3, 0)], copy=[(2, 3)])
    assert torch.equal(copier.cpu_caches[0][:, 0], first)
    assert torch.equal(copier.kv_caches[0][:, 3], copier.kv_caches[0][:, 2])
    run(copier, swap_in=[(0, 11)], copy=[(11, 4)])
    for block in (11, 4):
        assert torch.equal(copier.kv_caches[0][:, block], first)
        assert torch.equal(copier.kv_caches[1][:, block], other)


@st.composite
def steps(draw):
    """Lists as the core may give them: no target twice in a list, no copy from what another copy writes."""
    blocks, cpu_blocks = st.permutations(range(BLOCKS)), st.permutations(range(CPU_BLOCKS))
    num_out, num_in = draw(st.integers(0, CPU_BLOCKS)), draw(st.integers(0, CPU_BLOCKS))
    swap_out = list(zip(draw(blocks)[:num_out], draw(cpu_blocks)[:num_out], strict=True))
    swap_in = list(zip(draw(cpu_blocks)[:num_in], draw(blocks)[:num_in], strict=True))
    order = draw(blocks)
    num_targets = draw(st.integers(0, 8))
    targets, sources = order[:num_targets], order[num_targets:]
    copy = [(draw(st.sampled_from(sources)), target) for target in targets]
    return swap_out, swap_in, copy


@given(st.lists(steps(), min_size=1, max_size=4), st.sampled_from([1, 300, 1 << 20]))
def test_any_lists_equal_the_naive_loop(lists_of_steps, max_bytes_at_once):
    copier = make(max_bytes_at_once=max_bytes_at_once)
    for lists in lists_of_steps:
        check(copier, lists)


def test_without_a_tier_blocks_are_still_copied():
    copier = make(num_cpu_blocks=0)
    assert copier.cpu_caches == []
    expected = copier.kv_caches[2][:, 4].clone()
    run(copier, copy=[(4, 5)])
    assert torch.equal(copier.kv_caches[2][:, 5], expected)


def test_the_tier_takes_memory_only_where_it_is_used():
    before = psutil.Process().memory_info().rss
    zeros = zeros_on_host((2, 1 << 17, 16, 4, 8), torch.bfloat16)
    assert zeros.nbytes == 256 << 20
    assert psutil.Process().memory_info().rss - before < 64 << 20
    assert not zeros[1, -1].any()
