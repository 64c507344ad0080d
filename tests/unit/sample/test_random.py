"""The counter-based generator: equal to its definition in Python integers, uniform, and without visible structure."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import uniform

from rustvllm.sample.random import _on_device, counter_uniform

INT64 = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(st.tuples(INT64, st.integers(0, 2**31)), min_size=1, max_size=8))
def test_equals_its_definition(pairs):
    seeds, positions = (torch.tensor(column, dtype=torch.int64) for column in zip(*pairs, strict=True))
    numbers = counter_uniform(seeds, positions)
    assert numbers.dtype == torch.float64
    assert numbers.tolist() == [uniform(seed, position) for seed, position in pairs]
    assert _on_device(seeds, positions).tolist() == numbers.tolist(), "what a GPU computes"


def chi_square(numbers, bins=64):
    counts = np.bincount((np.asarray(numbers) * bins).astype(int), minlength=bins)
    expected = len(numbers) / bins
    return ((counts - expected) ** 2 / expected).sum()


def test_uniform_along_positions_and_along_seeds():
    n = 20_000
    zeros, ramp = torch.zeros(n, dtype=torch.int64), torch.arange(n)
    for seeds, positions in [(zeros, ramp), (ramp, zeros), (ramp, ramp), (-ramp, ramp + 7)]:
        numbers = counter_uniform(seeds, positions).numpy()
        assert numbers.min() >= 0
        assert numbers.max() < 1
        assert chi_square(numbers) < 110  # 63 degrees of freedom: the 99.98th percentile
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_neighbouring_seeds_share_no_stream():
    """Children of one request sample with seed + i."""
    positions = torch.arange(500)
    streams = [counter_uniform(torch.full((500,), seed), positions) for seed in range(20)]
    assert len(torch.stack(streams).unique()) == 500 * 20
