"""Penalties, truncation and draws against sorting, counting and summing in float64, and against the sampler."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rustvllm.kernels import draw, penalties, reference, truncation
from rustvllm.kernels.known_ids import known_ids
from rustvllm.sample import penalties as penalties_module
from rustvllm.sample import sampler as sampler_module
from rustvllm.sample.metadata import Penalties, SamplingMetadata
from rustvllm.sample.penalties import apply_penalties
from rustvllm.sample.random import counter_uniform
from rustvllm.sample.sampler import NO_TOKEN, NOTHING_LEFT, Sampler

SEEDS = st.integers(0, 2**31)
SIZES = st.sampled_from([1, 3, 70, 700])  # of the vocabulary; the last one is more than one block
few = settings(max_examples=12, derandomize=True, deadline=None)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that small vocabularies have several."""
    for module in (penalties, truncation):
        monkeypatch.setattr(module, "MAX_BLOCK", 256)
    monkeypatch.setattr(draw, "PART", 128)
    monkeypatch.setattr(draw, "BLOCK", 32)


def make_logits(seed, num_rows, vocab_size, device, kind="plain"):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
    if kind == "ties":
        logits = (logits / 2).round()  # −0 and 0 among them
    if kind == "masked":
        logits[:, 1:][torch.rand(num_rows, vocab_size - 1, generator=generator) < 0.7] = -torch.inf
    return logits.to(device)


def test_penalties(device, monkeypatch):
    monkeypatch.setattr(penalties_module, "runs_fused", lambda logits: False)

    @few
    @given(st.integers(1, 5), SIZES, SEEDS)
    def run(num_rows, vocab_size, seed):
        logits = make_logits(seed, num_rows + 1, vocab_size, device)
        generator = torch.Generator().manual_seed(seed)
        counts = torch.randint(-1, 4, (num_rows + 2, vocab_size), generator=generator).clamp(min=0).int()
        p = Penalties(
            rows=torch.randperm(num_rows + 1, generator=generator)[:num_rows].to(device),
            slots=torch.randperm(num_rows + 2, generator=generator)[:num_rows].to(device),
            presence=torch.randn(num_rows, generator=generator).to(device),
            frequency=torch.randn(num_rows, generator=generator).to(device),
            repetition=(0.5 + torch.rand(num_rows, generator=generator)).to(device),
            output_counts=counts.to(device),
            prompt_mask=(torch.rand(num_rows + 2, vocab_size, generator=generator) < 0.3).to(device),
        )
        arguments = (p.rows, p.slots, p.presence, p.frequency, p.repetition, p.output_counts, p.prompt_mask)
        out, expected, sampled = logits.clone(), logits.clone(), logits.clone()
        penalties.apply_penalties(out, *arguments)
        reference.apply_penalties(expected, *arguments)
        apply_penalties(sampled, p)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(out, sampled, atol=1e-5, rtol=1e-5)

    run()


def is_clear(logits, top_k, top_p):
    """Whether no cut of top_p lies within rounding of a token's border."""
    ordered = logits.double().sort(descending=True).values
    k = int(top_k) if 0 < top_k < len(logits) else len(logits)
    running = ordered[:k].softmax(0).cumsum(0)
    return bool(((running - float(top_p)).abs() > 1e-6).all()) or float(top_p) in (0.0, 1.0)


@pytest.mark.parametrize("kind", ["plain", "ties", "masked"])
def test_truncation_is_that_of_sorting(kind, device):
    num_compared = 0

    @settings(few, max_examples=8)  # of each kind: it is the one that takes the interpreter long
    @given(
        SIZES,
        st.lists(
            st.tuples(st.sampled_from([0, 1, 2, 5, 69, 300, 10**6]), st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0])),
            min_size=1,
            max_size=4,
        ),
        st.sampled_from(["both", "top_k", "top_p"]),
        SEEDS,
    )
    def run(vocab_size, limits, which, seed):
        nonlocal num_compared
        logits = make_logits(seed, len(limits), vocab_size, device, kind)
        top_k = torch.tensor([k for k, _ in limits], device=device)
        top_p = torch.tensor([p for _, p in limits], dtype=torch.float32, device=device)
        ks, ps = (top_k if which != "top_p" else None), (top_p if which != "top_k" else None)
        out, expected = logits.clone(), logits.clone()
        truncation.apply_top_k_top_p(out, ks, ps)
        reference.apply_top_k_top_p(expected, ks, ps)
        for row in range(len(limits)):
            if is_clear(logits[row], 0 if ks is None else ks[row], 1.0 if ps is None else ps[row]):
                assert torch.equal(out[row], expected[row]), (row, limits[row])
                num_compared += 1

    run()
    assert num_compared > 10


@pytest.mark.parametrize("kind", ["plain", "ties", "masked"])
def test_top_n_sigma_is_the_samplers(kind, device, monkeypatch):
    monkeypatch.setattr(sampler_module, "runs_fused", lambda logits: False)
    num_dropped = 0

    @few
    @given(SIZES, st.lists(st.sampled_from([-1.0, 0.0, 0.3, 1.0, 2.5, 1e30]), min_size=1, max_size=4), SEEDS)
    def run(vocab_size, limits, seed):
        nonlocal num_dropped
        logits = make_logits(seed, len(limits), vocab_size, device, kind)
        out, expected, n = logits.clone(), logits.clone(), torch.tensor(limits, device=device)
        truncation.apply_top_n_sigma(out, n)
        sampler_module.apply_top_n_sigma(expected, n)
        assert torch.equal(out, expected)
        num_dropped += int((out < logits).sum())
        alone = logits[-1:].clone()
        truncation.apply_top_n_sigma(alone, n[-1:])
        assert torch.equal(alone[0], out[-1])

    run()
    assert num_dropped > 100


def test_uniform_numbers_are_the_samplers(device):
    generator = torch.Generator().manual_seed(1)
    seeds = torch.randint(-(2**63), 2**63 - 1, (300,), generator=generator)
    seeds[:2] = torch.tensor([0, -1])
    positions = torch.randint(0, 2**31, (300,), generator=generator)
    expected = counter_uniform(seeds, positions)
    assert torch.equal(draw.counter_uniform(seeds.to(device), positions.to(device)).cpu(), expected)
    assert len(expected.unique()) == 300


@pytest.mark.parametrize("kind", ["plain", "masked"])
def test_draws_are_the_samplers(kind, device, monkeypatch):
    monkeypatch.setattr(sampler_module, "runs_fused", lambda logits: False)
    num_different = num_rows = 0

    @few
    @given(SIZES, st.integers(1, 4), SEEDS)
    def run(vocab_size, num, seed):
        nonlocal num_different, num_rows
        logits = make_logits(seed, num, vocab_size, device, kind)
        seeds = torch.arange(num) + seed
        positions = torch.arange(num) * 7
        out = draw.draw(logits, seeds.to(device), positions.to(device)).cpu()
        uniforms = counter_uniform(seeds, positions)
        metadata = SamplingMetadata(
            random_rows=torch.arange(num), temperature=torch.ones(num), seeds=seeds, positions=positions
        )
        sampled = Sampler().sample(logits.cpu().clone(), metadata)
        expected = reference.draw(logits.cpu(), uniforms)
        assert torch.isfinite(logits.cpu().gather(1, out[:, None])).all(), "what is masked was drawn"
        num_different += int((out != expected).sum()) + int((out != sampled).sum())
        num_rows += num

    run()
    assert num_rows > 20
    assert num_different == 0, "these seeds have no number within rounding of a border"


def static_draws(num, device, temperatures, seeds, *, has_last=True):
    """As a graph has them: parts of wider arrays, of which a row is written in each step."""
    inputs = torch.zeros((5, num + 3), dtype=torch.int32, device=device)
    inputs[0, :num] = torch.arange(num) * 7 + 5
    inputs[1, :num] = torch.arange(num).flip(0)
    halves = seeds.view(torch.int32).view(num, 2).T
    inputs[2:4, :num] = halves.to(device)
    inputs[4] = 1
    return draw.StaticDraws(
        temperatures=temperatures.to(device), seeds=inputs[2:4, :num], positions=inputs[0, :num], rows=inputs[1, :num],
        which=inputs[4], sampled=torch.full((3, num + 2), -9, dtype=torch.int32, device=device),
        last_token_ids=torch.full((num + 1,), -9, dtype=torch.int32, device=device) if has_last else None,
        counters=torch.zeros(num + 1, dtype=torch.int32, device=device),
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of numpy, in which the interpreter computes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_a_graph_chooses_is_what_a_step_without_would(device, dtype):
    num, vocab_size = 7, 500
    logits = make_logits(4, num, vocab_size, device).to(dtype)
    logits[1, 130] = torch.nan
    logits[2] = -torch.inf
    logits[3, 300] = torch.inf
    logits[6, 100:140] = logits[6].max() + 1  # equal ones, in two parts
    temperatures = torch.tensor([0.7, 1.0, 1.0, 2.0, 0.0, 1.3, 0.0])
    seeds = torch.tensor([1, 2, 3, 4, 5, -(2**62) - 12345, 2**63 - 1])
    draws = static_draws(num, device, temperatures, seeds)
    other = static_draws(num, device, temperatures, seeds)
    draw.choose(logits, draws)
    draw.choose(logits, draws)  # counters are as they were
    reference.choose(logits, other)
    assert torch.equal(draws.sampled, other.sampled)
    assert torch.equal(draws.last_token_ids, other.last_token_ids)
    ids = draws.sampled[1, :num].tolist()
    assert (ids[1:4], ids[6]) == ([NO_TOKEN, NOTHING_LEFT, 300], 100)
    assert draws.last_token_ids[:num].flip(0).tolist() == [max(i, 0) for i in ids]
    assert not draws.counters.any()
    drawn = [0, 5]
    tempered = logits[drawn].float() / temperatures[drawn, None].to(device)
    positions = draws.positions[drawn].long()
    assert draw.draw(tempered, seeds[drawn].to(device), positions).tolist() == [ids[i] for i in drawn]
    assert draw.argmax(logits[4:5]).tolist() == [ids[4]]
    assert ids[0] != int(logits[0].argmax()) or ids[5] != int(logits[5].argmax()), "something was drawn"
    without = static_draws(num, device, temperatures, seeds, has_last=False)
    draw.choose(logits, without)
    assert torch.equal(without.sampled, draws.sampled)


@pytest.mark.parametrize("num_ids", [0, 1, 300])
def test_ids_that_only_the_device_knows(num_ids, device):
    generator = torch.Generator().manual_seed(num_ids)
    both = torch.randint(-3, 5, (2, num_ids), generator=generator, dtype=torch.int32).to(device)
    ids, rows = both[0].clamp(min=-1), both[1].clamp(min=0)
    last = torch.arange(5, dtype=torch.int32, device=device) + 70
    out = known_ids(ids, rows, last)
    assert torch.equal(out, torch.where(ids < 0, last[rows.long()], ids))
    assert out.dtype == torch.int32
    if num_ids == 300:
        assert 0 < int((out >= 70).sum()) < 300


@pytest.mark.parametrize("kind", ["plain", "ties", "masked"])
def test_the_largest_is_the_first_of_equals(kind, device):
    logits = make_logits(8, 5, 700, device, kind)
    assert draw.argmax(logits).tolist() == logits.cpu().numpy().argmax(-1).tolist()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of numpy, in which the interpreter computes
def test_rows_without_a_distribution_give_their_largest_or_none(device):
    logits = make_logits(3, 5, 600, device)
    logits[0, 400] = logits[0, 500] = torch.nan
    logits[1] = -torch.inf
    logits[2, 300] = torch.inf
    logits[3, 599] = 1e30
    out = draw.draw(logits, torch.arange(5, device=device), torch.arange(5, device=device))
    assert out[:4].tolist() == [NO_TOKEN, NOTHING_LEFT, 300, 599]
    assert 0 <= int(out[4]) < 600


def test_no_rows(device):
    empty = torch.empty(0, 5, device=device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    truncation.apply_top_k_top_p(empty, none, None)
    truncation.apply_top_n_sigma(empty, none.float())
    assert draw.draw(empty, none, none).shape == (0,)
    assert draw.counter_uniform(none, none).shape == (0,)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["plain", "ties", "masked"])
def test_a_large_vocabulary_on_a_gpu(kind, device):
    logits = make_logits(5, 64, 151936, device, kind)
    top_k = torch.tensor([0, 1, 50, 5000] * 16, device=device)
    top_p = torch.tensor([1.0, 0.9, 0.5, 0.99] * 16, device=device)
    out, expected = logits.clone(), logits.clone()
    truncation.apply_top_k_top_p(out, top_k, top_p)
    reference.apply_top_k_top_p(expected, top_k, top_p)
    clear = [row for row in range(64) if is_clear(logits[row], top_k[row], top_p[row])]
    assert len(clear) > 48
    assert torch.equal(out[clear], expected[clear])


def test_the_sampler_takes_the_kernels(device, monkeypatch):
    """The same ids with them and without, for rows that are random, greedy, truncated and penalised."""
    vocab_size, num_rows = 300, 6
    generator = torch.Generator().manual_seed(9)
    random = torch.tensor([0, 1, 3, 4, 5], device=device)
    metadata = SamplingMetadata(
        random_rows=random,
        temperature=torch.tensor([0.7, 1.0, 1.3, 1.0, 2.0], device=device),
        seeds=torch.arange(5, device=device) * 77,
        positions=torch.arange(5, device=device) + 3,
        filters={
            "top_k": torch.tensor([0, 40, 7, 0, 0], device=device),
            "top_p": torch.tensor([1.0, 0.9, 1.0, 0.5, 0.95], device=device),
            "min_p": torch.tensor([0.0, 0.01, 0.0, 0.0, 0.2], device=device),
            "top_n_sigma": torch.tensor([0.0, 2.0, 0.0, 1.0, 3.0], device=device),
        },
        penalties=Penalties(
            rows=torch.tensor([1, 2], device=device),
            slots=torch.tensor([1, 0], device=device),
            presence=torch.tensor([0.5, 0.0], device=device),
            frequency=torch.tensor([0.1, 0.3], device=device),
            repetition=torch.tensor([1.2, 1.0], device=device),
            output_counts=torch.randint(0, 3, (2, vocab_size), generator=generator, dtype=torch.int32).to(device),
            prompt_mask=(torch.rand(2, vocab_size, generator=generator) < 0.1).to(device),
        ),
    )
    logits = make_logits(11, num_rows, vocab_size, device)
    taken = []
    kernels = (
        (truncation, "apply_top_n_sigma"),
        (truncation, "apply_top_k_top_p"),
        (draw, "draw"),
        (penalties, "apply_penalties"),
    )
    for module, name in kernels:
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, function=function: (taken.append(function), function(*args))[1])
    with_kernels = Sampler().sample(logits.clone(), metadata)
    assert len(taken) == 4
    for module in (sampler_module, penalties_module):
        monkeypatch.setattr(module, "runs_fused", lambda logits: False)
    assert Sampler().sample(logits.clone(), metadata).tolist() == with_kernels.tolist()
    assert len(taken) == 4
