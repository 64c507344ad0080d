"""Drawing by the core: the same ids as the float64 reference, and as torch; wrong arrays are refused."""

from dataclasses import replace

import numpy as np
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_sampler import ROWS, expected_token, metadata

from rustvllm import _core
from rustvllm.sample.cpu_draw import CpuDraw
from rustvllm.sample.metadata import Penalties
from rustvllm.sample.penalties import apply_penalties
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
    with pytest.raises(TypeError, match="top_k must be an array of int64"):
        draw(top_k=np.zeros(1, np.float32))
    with pytest.raises(TypeError, match="top_p must be an array of float32"):
        draw(top_p=np.zeros(1))
    with pytest.raises(ValueError, match=r"uniforms must have the shape \[1\], got \[3\]"):
        draw(uniforms=np.zeros(3))
    with pytest.raises(ValueError, match="numbers has top_q, which is not in SAMPLING_NUMBERS"):
        draw(top_q=np.zeros(1))
    with pytest.raises(TypeError, match="float32"):
        draw(np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"C-contiguous and have the shape \[n, vocab_size\], got \[3\]"):
        draw(np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="C-contiguous"):
        draw(np.zeros((3, 2), np.float32).T)
    with pytest.raises(ValueError, match="no ids"):
        draw(np.zeros((2, 0), np.float32))
    read_only = np.zeros((2, 3), np.float32)
    read_only.flags.writeable = False
    assert draw(read_only) == [0]  # nothing is written to them


def penalties_of(num_rows, vocab_size, seed):
    """Penalties of every row but the first, whose counts lie anywhere among some more; and logits of all kinds."""
    rng = np.random.default_rng(seed)
    num_slots = num_rows + 2
    held = rng.random((num_slots, vocab_size)) < 0.1
    counts = np.where(held, rng.integers(1, 5, held.shape), 0).astype(np.int32)
    counts[:, vocab_size // 3 : vocab_size // 2] = 0
    rows = rng.permutation(np.arange(1, num_rows))
    logits = torch.from_numpy(rng.standard_normal((num_rows, vocab_size)).astype(np.float32) * 4)
    logits[:, ::7] = -torch.inf
    logits[0, 0] = logits[-1, -1] = torch.nan
    number = lambda low, high: torch.from_numpy(rng.uniform(low, high, len(rows)).astype(np.float32))  # noqa: E731
    return logits, Penalties(
        rows=torch.from_numpy(rows),
        slots=torch.from_numpy(rng.permutation(num_slots)[: len(rows)]),
        presence=number(-2, 2),
        frequency=number(-2, 2),
        repetition=number(0.1, 3),
        output_counts=torch.from_numpy(counts),
        prompt_mask=torch.from_numpy(rng.random(held.shape) < 0.05),
    )


@pytest.mark.parametrize("vocab_size", [1, 63, 64, 1000, 40_000])
def test_penalties_are_those_of_torch_bit_for_bit(vocab_size):
    logits, penalties = penalties_of(5, vocab_size, seed=vocab_size)
    found, expected = logits.clone(), logits.clone()
    CpuDraw(THREADS).penalize(found, penalties)
    apply_penalties(expected, penalties)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    assert vocab_size == 1 or not torch.equal(found[1:-1], logits[1:-1])


def test_wrong_penalties_are_refused_by_the_core():
    logits, penalties = penalties_of(3, 40, seed=0)

    def penalize(**changed):
        CpuDraw(THREADS).penalize(logits, replace(penalties, **changed))

    penalize()
    for slots in ([5, 0], [-1, 0]):
        with pytest.raises(ValueError, match=f"slot {slots[0]} is not in 0 to 5"):
            penalize(slots=torch.tensor(slots))
    with pytest.raises(ValueError, match="row 1 is given twice"):
        penalize(rows=torch.tensor([1, 1]))
    with pytest.raises(ValueError, match=r"presence must have the shape \[2\]"):
        penalize(presence=torch.zeros(3))
    with pytest.raises(TypeError, match="frequency must be an array of float32"):
        penalize(frequency=torch.zeros(2, dtype=torch.float64))
    for table in ("output_counts", "prompt_mask"):
        whole = getattr(penalties, table)
        for wrong in (whole[:, 1:].contiguous(), whole.repeat(1, 2)[:, ::2], whole[0]):
            with pytest.raises(ValueError, match=rf"{table} must be C-contiguous and have the shape \[capacity, 40\]"):
                penalize(**{table: wrong})
    with pytest.raises(TypeError, match="output_counts must be an array of int32"):
        penalize(output_counts=penalties.output_counts.long())
