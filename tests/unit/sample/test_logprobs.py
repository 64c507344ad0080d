"""Log-probabilities against a plain softmax in float64, by torch and by the core."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rustvllm import _core
from rustvllm.sample.cpu_draw import CpuDraw
from rustvllm.sample.listed_tokens import RowTokens
from rustvllm.sample.logprobs import LogprobsMetadata, ProcessedLogits
from rustvllm.sample.metadata import SamplingMetadata
from rustvllm.sample.sampler import Sampler
from rustvllm.sample.scorer import Scorer, largest

CPU_DRAW = {"torch": None, "core": CpuDraw(_core.CpuThreads(2))}
by_each = pytest.mark.parametrize("by", CPU_DRAW)


def metadata(rows, num_logprobs):
    rows = np.asarray(rows, np.int32)
    return LogprobsMetadata(torch.from_numpy(rows.astype(np.int64)), rows, np.asarray(num_logprobs, np.int32))


def scored(by, logits, token_ids, wanted, mode="raw_logprobs", **sampling):
    scorer = Scorer(mode, CPU_DRAW[by])
    kept = scorer.keep_raw(logits, SamplingMetadata(logprobs=wanted, **sampling), will_mask=False)
    gathered = scorer.score_sampled(kept, token_ids)
    return gathered.arrays(gathered.tensors)


@by_each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(3))
def test_they_are_those_of_a_plain_softmax(seed, dtype, by):
    torch.manual_seed(seed)
    logits = (torch.randn(6, 40) * 4).to(dtype)
    wanted = metadata([0, 2, 3, 5], [3, 0, 20, 7])
    token_ids = torch.randint(0, 40, (6,))
    got = scored(by, logits, token_ids, wanted)
    assert [array.dtype for array in got.as_tuple()] == [np.int32, np.int32, np.float32, np.int32]
    assert all(array.flags.c_contiguous for array in got.as_tuple())
    plain = torch.log_softmax(logits.double(), dim=-1).numpy()
    assert got.places.tolist() == [0, 2, 3, 5]
    for row, k, ids, values, rank in zip(
        got.places, [3, 0, 20, 7], got.token_ids, got.logprobs, got.ranks, strict=True
    ):
        own = int(token_ids[row])
        assert (ids[0], rank) == (own, 1 + int((logits[row] > logits[row, own]).sum()))
        assert values[0] == pytest.approx(plain[row, own], abs=1e-5)
        assert (ids[1 + k :] == -1).all()
        assert values[1 : 1 + k] == pytest.approx(plain[row, ids[1 : 1 + k]], abs=1e-5)
        assert values[1 : 1 + k] == pytest.approx(np.sort(plain[row])[::-1][:k], abs=1e-5)


@by_each
@pytest.mark.parametrize("will_mask", [False, True])
def test_they_are_of_the_logits_before_the_sampler_changes_them(by, will_mask):
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    wanted = metadata([0], [3])
    masked = SamplingMetadata(masked_rows=torch.tensor([0]), masked_ids=torch.tensor([1]), logprobs=wanted)
    scorer, sampler = Scorer("raw_logprobs", CPU_DRAW[by]), Sampler(CPU_DRAW[by])
    if will_mask:
        kept = scorer.keep_raw(logits, SamplingMetadata(logprobs=wanted), will_mask=True)
        sampler.mask(logits, torch.tensor([[0b101]], dtype=torch.int32), torch.tensor([0]))
    else:
        kept = scorer.keep_raw(logits, masked, will_mask=False)
    token_ids = sampler.sample(logits, masked)
    assert logits[0, 1] == -torch.inf
    gathered = scorer.score_sampled(kept, token_ids)
    got = gathered.arrays(gathered.tensors)
    assert got.token_ids.tolist() == [[2, 1, 2, 0]]
    assert got.ranks.tolist() == [2]
    expected = torch.tensor([1.0, 3.0, 1.0, 0.0]) - torch.tensor([0.0, 3.0, 1.0]).logsumexp(0)
    assert got.logprobs[0] == pytest.approx(expected.numpy(), abs=1e-6)


@by_each
@pytest.mark.parametrize("transposed", [False, True])
def test_a_draw_leaves_the_logits_that_are_scored(by, transposed):
    torch.manual_seed(3)
    logits = torch.randn(5, 300) * 3
    if transposed:
        logits = logits.T.contiguous().T
    wanted = metadata(range(5), [4] * 5)
    rows = torch.arange(5)
    sampling = SamplingMetadata(
        random_rows=rows, temperature=torch.full((5,), 0.5), seeds=rows, positions=rows, logprobs=wanted
    )
    expected = torch.log_softmax(logits.double(), dim=-1)
    scorer = Scorer("raw_logprobs", CPU_DRAW[by])
    kept = scorer.keep_raw(logits, sampling, will_mask=False)
    token_ids = Sampler(CPU_DRAW[by]).sample(logits, sampling)
    gathered = scorer.score_sampled(kept, token_ids)
    got = gathered.arrays(gathered.tensors)
    torch.testing.assert_close(
        torch.from_numpy(got.logprobs).double(),
        expected.gather(1, torch.from_numpy(got.token_ids).to(torch.int64)),
        atol=1e-5,
        rtol=0,
    )


@by_each
def test_more_than_the_vocabulary_and_what_cannot_be(by):
    logits = torch.tensor([[0.0, -torch.inf], [torch.nan, 1.0]])
    got = scored(by, logits, torch.tensor([0, 0]), metadata([0, 1], [5, 5]))
    assert got.token_ids.shape == (2, 3)
    assert got.logprobs[0].tolist() == [0.0, 0.0, -np.inf]
    assert np.isnan(got.logprobs[1]).all()


@by_each
@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits"])
def test_named_tokens_come_instead_of_the_likeliest_and_as_exactly(by, mode):
    torch.manual_seed(7)
    logits = torch.randn(6, 40) * 4
    token_ids = torch.randint(0, 40, (6,))
    rows = RowTokens()
    rows.admit(20, [39, 0, int(token_ids[2])])
    rows.admit(50, [7])
    rows.admit(60, [1, 2, 3])  # of another row
    plain = metadata([0, 2, 3, 5], [3, 0, 20, 0])
    wanted = replace(plain, listed=rows.select(10 * plain.host_rows, torch.from_numpy))
    got, alone = scored(by, logits, token_ids, wanted, mode), scored(by, logits, token_ids, plain, mode)
    everything = scored(by, logits, token_ids, metadata(range(6), [40] * 6), mode)
    assert all(array.flags.c_contiguous for array in got.as_tuple())
    assert (got.places.tolist(), got.ranks.tolist()) == (alone.places.tolist(), alone.ranks.tolist())
    for place, row, named in [(1, 2, [39, 0, int(token_ids[2])]), (3, 5, [7])]:
        of_row = dict(zip(everything.token_ids[row].tolist(), everything.logprobs[row].tolist(), strict=True))
        count = 1 + len(named)
        assert got.token_ids[place, :count].tolist() == [int(token_ids[row]), *named]
        assert (got.token_ids[place, count:] == -1).all()
        assert got.logprobs[place, :count].tolist() == [of_row[each] for each in got.token_ids[place, :count].tolist()]
    for place in (0, 2):  # as if no other row named any
        assert got.token_ids[place].tolist() == alone.token_ids[place].tolist()
        assert got.logprobs[place].tolist() == alone.logprobs[place].tolist()


def test_rows_name_tokens_until_they_are_left():
    rows = RowTokens()
    asked = np.array([3, 1], np.int32)
    assert rows.find(asked) is None
    rows.admit(3, [])
    assert rows.find(asked) is None
    rows.admit(1, [4, 5])
    which, ids = rows.find(asked)
    assert (which.tolist(), ids.tolist()) == ([1], [[4, 5]])
    rows.admit(3, [6])
    which, ids = rows.find(asked)
    assert (which.tolist(), ids.tolist()) == ([0, 1], [[6, -1], [4, 5]])
    rows.drop(np.array([1, 3], np.int32))
    assert rows.find(asked) is None


@by_each
def test_raw_logits_are_as_they_are(by):
    logits = torch.tensor([[0.5, -2.0, 7.0]])
    got = scored(by, logits, torch.tensor([1]), metadata([0], [2]), "raw_logits")
    assert (got.token_ids.tolist(), got.logprobs.tolist(), got.ranks.tolist()) == ([[1, 2, 0]], [[-2.0, 7.0, 0.5]], [3])


@by_each
def test_processed_ones_are_what_is_drawn_from(by):
    torch.manual_seed(0)
    logits = torch.randn(4, 12) * 3
    wanted = metadata([0, 1, 3], [12, 12, 12])
    processed = ProcessedLogits(wanted)
    random = torch.tensor([1, 2, 3])
    sampling = SamplingMetadata(
        random_rows=random, temperature=torch.tensor([0.5, 1.0, 2.0]), seeds=random, positions=random,
        filters={"top_k": torch.tensor([3, 0, 0])}, masked_rows=torch.tensor([0]), masked_ids=torch.tensor([5]),
        logprobs=wanted, processed=processed,
    )  # fmt: skip
    expected = logits.double()
    expected[0, 5] = -torch.inf
    expected[1] /= 0.5
    expected[3] /= 2.0
    expected[1][expected[1] < expected[1].topk(3).values[-1]] = -torch.inf
    token_ids = Sampler().sample(logits.clone(), sampling)
    torch.testing.assert_close(processed.values.double(), expected[[0, 1, 3]], atol=1e-5, rtol=0)
    scorer = Scorer("processed_logprobs", CPU_DRAW[by])
    assert scorer.keep_raw(logits, sampling, will_mask=False) is None
    gathered = scorer.score_sampled(scorer.of_processed(sampling), token_ids)
    got = gathered.arrays(gathered.tensors)
    assert np.isneginf(got.logprobs[1][4:]).all()
    assert np.exp(got.logprobs[1][1:4].astype(np.float64)).sum() == pytest.approx(1)
    greedy = ProcessedLogits(wanted)
    Sampler().sample(logits.clone(), SamplingMetadata(logprobs=wanted, processed=greedy))
    assert torch.equal(greedy.values, logits[[0, 1, 3]])
    assert scorer.of_processed(SamplingMetadata()) is None


@by_each
@pytest.mark.parametrize("steps", [4, 1 << 20])  # of many steps hardly any two numbers are equal
def test_of_equal_candidates_the_first_ids_are_taken_however_many_are_asked_for(steps, by):
    random = np.random.default_rng(5)
    values = torch.from_numpy(random.integers(-steps, steps - 1, (40, 300)).astype(np.float32) / steps - 1)
    values[3, :7] = -torch.inf
    values[4, 10:20] = values[5, 290:] = 1.0
    values[6, ::2], values[6, 1::2] = 0.0, -0.0
    for count in (0, 1, 3, 5, 20, 299, 300):
        if by == "torch":
            found, ids = largest(values, count)
        else:
            rows = torch.arange(40)
            ids, found, *_ = CPU_DRAW[by].score(values, rows, rows, count, is_normalized=False)
            ids, found = ids[:, 1:], found[:, 1:]
        for row, of_row in enumerate(values.tolist()):
            expected = sorted(range(300), key=lambda place, of_row=of_row: (-of_row[place], place))[:count]
            assert ids[row].tolist() == expected
            assert found[row].tolist() == [of_row[place] for place in expected]


def test_wrong_arrays_are_refused():
    threads, logits = _core.CpuThreads(2), np.zeros((3, 5), np.float32)
    good = {
        "logits": logits, "rows": np.array([0, 2]), "token_ids": np.array([4, 0]), "is_normalized": True,
        "ids": np.zeros((2, 6), np.int32), "values": np.zeros((2, 6), np.float32), "ranks": np.zeros(2, np.int32),
        "log_totals": np.zeros(2),
    }  # fmt: skip
    _core.score_token_ids(threads, **good)
    frozen = np.zeros((2, 6), np.float32)
    frozen.flags.writeable = False
    for name, array, error, message in [
        ("logits", logits.astype(np.float64), TypeError, "logits must be an array of float32"),
        ("logits", logits[:, ::2], ValueError, "logits must be C-contiguous"),
        ("rows", np.array([0, 3]), ValueError, "row 3 is given twice, or is not in 0 to 3 − 1"),
        ("token_ids", np.array([5, 0]), ValueError, "token id 5 is not in 0 to 5 − 1"),
        ("token_ids", np.array([-1, 0]), ValueError, "token id -1 is not"),
        ("token_ids", np.array([0]), ValueError, r"token_ids must have the shape \[2\]"),
        ("ids", np.zeros((2, 0), np.int32), ValueError, r"ids must be C-contiguous and have the shape \[2, 1 to 6\]"),
        ("ids", np.zeros((2, 7), np.int32), ValueError, r"ids must be C-contiguous and have the shape \[2, 1 to 6\]"),
        ("ids", np.zeros((1, 6), np.int32), ValueError, r"ids must be C-contiguous and have the shape \[2, 1 to 6\]"),
        (
            "values",
            np.zeros((2, 5), np.float32),
            ValueError,
            r"values must .* the shape \[2, 6\], got \[2, 5\]",
        ),
        ("values", frozen, ValueError, "values must be writable"),
        ("ranks", np.zeros(3, np.int32), ValueError, r"ranks must be C-contiguous and have the shape \[2\], got \[3\]"),
        ("ranks", np.zeros(2, np.int64), TypeError, "ranks must be an array of int32"),
        ("log_totals", np.zeros(3), ValueError, r"log_totals must .* the shape \[2\], got \[3\]"),
        ("log_totals", np.zeros(2, np.float32), TypeError, "log_totals must be an array of float64"),
    ]:
        with pytest.raises(error, match=message):
            _core.score_token_ids(threads, **good | {name: array})
