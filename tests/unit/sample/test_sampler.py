"""The sampler against the float64 reference, for each parameter and for mixtures, and row by row independence."""

import numpy as np
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st

from rustvllm.sample import sampler as sampler_module
from rustvllm.sample.metadata import Penalties, SamplingMetadata
from rustvllm.sample.sampler import NO_TOKEN, NOTHING_LEFT, Sampler, apply_min_p, apply_top_k_top_p, apply_top_n_sigma
from rustvllm.sampling_params.table import FILTERS

DEFAULTS = {"temperature": 1.0, "seed": 0, "position": 0} | {number.name: number.default for number in FILTERS}


def metadata(rows, **more):
    """Metadata of rows given as dictionaries; a temperature of 0 is greedy."""
    rows = [DEFAULTS | row for row in rows]
    random = [i for i, row in enumerate(rows) if row["temperature"] >= 1e-5]
    if not random:
        return SamplingMetadata(**more)

    def column(name, dtype):
        return torch.tensor([rows[i][name] for i in random], dtype=dtype)

    filters = {each.name: column(each.name, torch.int64 if each.is_integer else torch.float32) for each in FILTERS}
    return SamplingMetadata(
        random_rows=torch.tensor(random),
        temperature=column("temperature", torch.float32),
        seeds=column("seed", torch.int64),
        positions=column("position", torch.int64),
        filters={name: values for name, values in filters.items() if (values != DEFAULTS[name]).any()},
        **more,
    )


def sample(logits, rows, **more):
    return Sampler().sample(logits.clone(), metadata(rows, **more)).tolist()


def expected_token(logits, row):
    row = DEFAULTS | row
    if row["temperature"] < 1e-5:
        return int(np.argmax(logits))
    kept = {number.name: row[number.name] for number in FILTERS}
    probabilities = reference.distribution(logits, float(np.float32(row["temperature"])), **kept)
    return reference.draw(probabilities, reference.uniform(row["seed"], row["position"]))


ROWS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.01, 0.5, 1.0, 2.0]),
        "top_k": st.sampled_from([-1, 0, 1, 2, 5, 16, 40, 1000]),
        "top_p": st.sampled_from([0.01, 0.3, 0.77, 0.95, 1.0]),
        "top_n_sigma": st.sampled_from([-1.0, 0.0, 0.0, 0.37, 1.0, 1.9]),
        "min_p": st.sampled_from([0.0, 0.013, 0.21, 1.0]),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "position": st.integers(0, 10_000),
    }
)


@given(st.lists(ROWS, min_size=1, max_size=8), st.integers(0, 2**31), st.sampled_from([2, 5, 40, 64, 65, 130, 1000]))
def test_any_mixture_equals_the_reference(rows, seed, vocab_size):
    logits = torch.randn(len(rows), vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    assert sample(logits, rows) == [expected_token(x.tolist(), row) for x, row in zip(logits, rows, strict=True)]


@given(st.integers(0, 2**31), st.sampled_from([0.1, 0.5, 0.9, 0.999]), st.sampled_from([0.1, 1.0, 4.0]))
def test_top_p_is_the_same_with_few_candidates_and_with_a_full_sort(seed, top_p, spread):
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(seed)) * spread
    p = torch.tensor([top_p, 1.0, 0.3, top_p])
    k = torch.tensor([0, 0, 0, 7])
    with pytest.MonkeyPatch.context() as patch:
        results = []
        for candidates in (8, 64, 300):
            patch.setattr(sampler_module, "TOP_P_CANDIDATES", candidates)
            results.append(logits.clone())
            apply_top_k_top_p(results[-1], k, p)
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[2])
    for row in range(4):
        expected = reference.distribution(logits[row].tolist(), top_k=int(k[row]), top_p=float(p[row]))
        assert (results[2][row] > -torch.inf).tolist() == [probability > 0 for probability in expected]


def test_equal_logits_are_kept_or_dropped_together():
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    apply_top_k_top_p(logits, torch.tensor([2]), None)
    assert (logits > -torch.inf).tolist() == [[False, True, True, True, False]]


@pytest.mark.parametrize(
    ("row", "support"),
    [
        ({"top_k": 1}, 1),
        ({"top_k": 3}, 3),
        ({"top_p": 1e-6}, 1),
        ({"min_p": 1.0}, 1),
        ({"top_n_sigma": 0.5}, 2),
        ({"top_n_sigma": 1.5}, 3),
        ({"top_n_sigma": 1.5, "temperature": 0.4}, 3),
        ({"top_n_sigma": -1.0}, 6),
        ({"top_k": 10**9}, 6),
        ({}, 6),
    ],
)
def test_only_what_may_be_drawn_is_drawn_as_often_as_it_should(row, support):
    """Chi-square over fixed seeds."""
    values = [2.0, 1.5, 1.0, 0.0, -0.5, -1.0]
    n = 4000
    drawn = sample(torch.tensor([values] * n), [row | {"seed": seed, "position": 3} for seed in range(n)])
    probabilities = np.array(reference.distribution(values, **{k: v for k, v in row.items() if k != "seed"}))
    counts = np.bincount(drawn, minlength=6)
    assert (counts > 0).sum() == support == (probabilities > 0).sum()
    kept = probabilities > 0
    assert (((counts - n * probabilities)[kept]) ** 2 / (n * probabilities)[kept]).sum() < 25  # 5 degrees: 99.99 %


def test_one_seed_along_positions_has_the_right_distribution():
    values = [1.0, 0.0, -1.0, 0.5]
    n = 4000
    drawn = sample(torch.tensor([values] * n), [{"seed": 42, "position": p, "temperature": 0.7} for p in range(n)])
    probabilities = np.array(reference.distribution(values, temperature=0.7))
    counts = np.bincount(drawn, minlength=4)
    assert ((counts - n * probabilities) ** 2 / (n * probabilities)).sum() < 21


@given(
    st.lists(ROWS, min_size=2, max_size=12),
    st.integers(0, 2**31),
    st.sampled_from([64, 200]),
    st.randoms(use_true_random=False),
)
def test_a_row_does_not_depend_on_its_company(rows, seed, vocab_size, shuffler):
    logits = torch.randn(len(rows), vocab_size, generator=torch.Generator().manual_seed(seed)) * 2
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    order = list(range(len(rows)))
    shuffler.shuffle(order)
    shuffled = sample(logits[order], [rows[i] for i in order])
    assert together == alone
    assert shuffled == [together[i] for i in order]


@pytest.mark.parametrize(
    "bad", [[float("nan")] * 6, [0.0, float("nan"), 1.0, 2.0, 3.0, 4.0], [float("inf"), 0.0] * 3, [float("-inf")] * 6]
)
@pytest.mark.parametrize(
    "row",
    [
        {"temperature": 0.0},
        {},
        {"top_k": 2},
        {"top_p": 0.5},
        {"min_p": 0.5},
        {"top_n_sigma": 1.0},
        {"top_k": 3, "top_p": 0.9, "min_p": 0.1},
    ],
)
def test_a_bad_row_gives_no_token_and_harms_no_other(bad, row):
    good = torch.tensor([[1.0, 2.0, 3.0, 2.0, 1.0, 0.0]])
    logits = torch.cat((good, torch.tensor([bad]), good))
    rows = [row | {"seed": 1}, row | {"seed": 2}, row | {"seed": 3}]
    drawn = sample(logits, rows)
    without_any = NOTHING_LEFT if bad[0] == -float("inf") else NO_TOKEN
    assert drawn[1] == (0 if bad[0] == float("inf") else without_any)
    assert [drawn[0]] == sample(good, rows[:1])
    assert [drawn[2]] == sample(good, rows[2:])


def test_masked_ids_are_never_drawn():
    logits = torch.tensor([[5.0, 1.0, 0.0], [5.0, 1.0, 0.0], [5.0, 1.0, 0.0]])
    masked = {"masked_rows": torch.tensor([1, 2, 2]), "masked_ids": torch.tensor([0, 0, 1])}
    assert sample(logits, [{"temperature": 0.0}] * 3, **masked) == [0, 1, 2]
    assert sample(logits, [{"temperature": 0.0}, {"seed": 4, "top_k": 1}, {"seed": 5}], **masked) == [0, 1, 2]


@given(
    st.lists(st.integers(0, 8), max_size=12),
    st.lists(st.integers(0, 8), max_size=12),
    st.sampled_from([-2.0, 0.0, 0.5]),
    st.sampled_from([-1.5, 0.0, 0.25]),
    st.sampled_from([0.5, 1.0, 1.7]),
    st.integers(0, 2**31),
)
def test_penalties_equal_the_reference(prompt, output, presence, frequency, repetition, seed):
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(seed))
    counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=9).to(torch.int32)[None]
    mask = torch.zeros(1, 9, dtype=torch.bool)
    mask[0, prompt] = True
    changed = logits.clone()
    sampler_module.apply_penalties(
        changed,
        Penalties(
            torch.tensor([1]),
            torch.tensor([0]),
            torch.tensor([presence]),
            torch.tensor([frequency]),
            torch.tensor([repetition]),
            counts,
            mask,
        ),
    )
    expected = reference.penalised(logits[1].tolist(), prompt, output, presence, frequency, repetition)
    torch.testing.assert_close(changed[1], torch.tensor(expected))
    assert torch.equal(changed[[0, 2]], logits[[0, 2]])


@pytest.mark.parametrize("vocab_size", [64, 70, 300])
def test_what_has_no_probability_is_never_drawn_whatever_is_rounded(vocab_size):
    """Uniforms up to the largest below one, where whole blocks and what is around their ends have none."""
    generator = torch.Generator().manual_seed(3)
    uniforms = torch.tensor([0.0, 2.0**-53, 0.5, 1 - 2.0**-30, 1 - 2.0**-53], dtype=torch.float64)
    for last in (0, 5, 62, 63, 64, 69, vocab_size - 1):
        if last >= vocab_size:
            continue
        for _ in range(50):
            row = torch.rand(vocab_size, generator=generator)
            row[torch.rand(vocab_size, generator=generator) < 0.7] = 0
            row[last] = 1e-3
            row[last + 1 :] = 0
            drawn, is_drawn = sampler_module._invert(row.expand(len(uniforms), -1), uniforms)
            assert is_drawn.all()
            assert (row[drawn] > 0).all()
            assert int(drawn[0]) == int((row > 0).nonzero()[0])
            assert int(drawn[-1]) <= last
    nothing = sampler_module._invert(torch.zeros(1, vocab_size), uniforms[:1])
    assert not nothing[1].any()


def test_half_precision_logits_are_sampled_in_float32():
    logits = torch.tensor([[1.0, 3.0, 2.0]], dtype=torch.bfloat16)
    assert sample(logits, [{"temperature": 0.0}]) == [1]


@given(st.integers(0, 2**31), st.sampled_from([0.1, 0.77, 1.0, 2.5]), st.sampled_from([1, 5, 64, 130]))
def test_top_n_sigma_equals_the_reference_whatever_is_masked(seed, n, vocab_size):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, vocab_size, generator=generator) * 3
    logits[:, 1:][torch.rand(3, vocab_size - 1, generator=generator) < 0.4] = -torch.inf
    kept = logits.clone()
    apply_top_n_sigma(kept, torch.tensor([n, 0.0, -1.0]))
    near = torch.tensor(reference.within_sigma(logits[0].tolist(), float(np.float32(n))))
    assert torch.equal(kept[0], torch.where(near, logits[0], -torch.inf))
    assert torch.equal(kept[1:], logits[1:])


def test_top_n_sigma_keeps_equals_whose_deviation_is_nothing():
    logits = torch.full((3, 70), 2.5)
    apply_top_n_sigma(logits, torch.tensor([0.5, 1e30, torch.inf]))
    assert (logits == 2.5).all()


def test_min_p_zero_keeps_everything():
    logits = torch.tensor([[0.0, -80.0], [0.0, -80.0]])
    apply_min_p(logits, torch.tensor([0.0, 0.5]))
    assert logits.tolist() == [[0.0, -80.0], [0.0, float("-inf")]]
