"""Drawing by the core: the same ids as the float64 reference, and as torch; wrong arrays are refused."""

import numpy as np
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_sampler import ROWS, expected_token, metadata

from rustvllm import _core
from rustvllm.sample.cpu_draw import CpuDraw
from rustvllm.sample.sampler import NO_TOKEN, NOTHING_LEFT, Sampler

THREADS = _core.CpuThreads(2)


def sample(logits, rows):
    return Sampler(CpuDraw(THREADS)).sample(logits.clone(), metadata(rows)).tolist()


@given(st.lists(ROWS, min_size=1, max_size=8), st.integers(0, 2**31), st.sampled_from([1, 5, 64, 65, 130, 3000]))
def test_any_mixture_equals_the_reference_and_torch(rows, seed, vocab_size):
    logits = torch.randn(len(rows), vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    drawn = sample(logits, rows)
    assert drawn == [expected_token(x.tolist(), row) for x, row in zip(logits, rows, strict=True)]
    assert drawn == Sampler().sample(logits.clone(), metadata(rows)).tolist()


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ([float("nan")] * 6, NO_TOKEN),
        ([0.0, float("nan")] * 3, NO_TOKEN),
        ([-np.inf] * 6, NOTHING_LEFT),
        ([np.inf, 0] * 3, 0),
    ],
)
@pytest.mark.parametrize("row", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_n_sigma": 1.0}])
def test_a_bad_row_harms_no_other(bad, expected, row):
    good = torch.tensor([[1.0, 2.0, 3.0, 2.0, 1.0, 0.0]])
    rows = [row | {"seed": seed} for seed in range(3)]
    drawn = sample(torch.cat((good, torch.tensor([bad]), good)), rows)
    assert drawn == [*sample(good, rows[:1]), expected, *sample(good, rows[2:])]


@pytest.mark.parametrize(
    "row",
    [{}, {"top_k": 30}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_n_sigma": 1.0}, {"temperature": 2.0, "top_p": 0.99}],
)
def test_the_distribution_is_right(row):
    """Chi-square over fixed seeds and 200 ids."""
    n = 6000
    values = torch.randn(200, generator=torch.Generator().manual_seed(1)) * 2
    drawn = sample(values.expand(n, -1), [row | {"seed": seed, "position": 7} for seed in range(n)])
    probabilities = np.array(reference.distribution(values.tolist(), **row))
    counts = np.bincount(drawn, minlength=200)
    assert not counts[probabilities == 0].any()
    often = n * probabilities >= 5
    chi = (((counts - n * probabilities)[often]) ** 2 / (n * probabilities)[often]).sum()
    freedom = often.sum() - 1
    assert chi < freedom + 4 * np.sqrt(2 * freedom) + 8  # beyond it: less than once in 10,000 seeds


def test_wrong_arrays_are_refused():
    def draw(logits=None, rows=(0,), uniforms=None, **numbers):
        logits = np.zeros((2, 3), np.float32) if logits is None else logits
        uniforms = np.zeros(len(rows)) if uniforms is None else uniforms
        return _core.draw_token_ids(THREADS, logits, np.array(rows, np.int64), uniforms, numbers)

    assert draw() == [0]
    assert draw(rows=[]) == []
    assert draw(np.zeros((0, 3), np.float32), rows=[]) == []
    for rows in ([2], [-1], [1, 1]):
        with pytest.raises(ValueError, match=f"row {rows[-1]} is given twice, or is not in 0 to 2"):
            draw(rows=rows)
    with pytest.raises(ValueError, match=r"top_k must have the shape \[1\], got \[2\]"):
        draw(top_k=np.zeros(2, np.int64))
    with pytest.raises(TypeError, match="top_k has another dtype"):
        draw(top_k=np.zeros(1, np.float32))
    with pytest.raises(TypeError, match="top_p has another dtype"):
        draw(top_p=np.zeros(1))
    with pytest.raises(ValueError, match=r"uniforms must have the shape \[1\], got \[3\]"):
        draw(uniforms=np.zeros(3))
    with pytest.raises(ValueError, match="numbers has top_q, which is not in SAMPLING_NUMBERS"):
        draw(top_q=np.zeros(1))
    with pytest.raises(TypeError, match="float32"):
        draw(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="2 dimensions"):
        draw(np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="C-contiguous"):
        draw(np.zeros((3, 2), np.float32).T)
    with pytest.raises(ValueError, match="no ids"):
        draw(np.zeros((2, 0), np.float32))
    read_only = np.zeros((2, 3), np.float32)
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="writable"):
        draw(read_only)
