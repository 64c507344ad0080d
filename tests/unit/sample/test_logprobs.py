"""Log-probabilities against a plain softmax in float64."""

import numpy as np
import pytest
import torch

from rustvllm.sample.logprobs import (
    LogprobsMetadata,
    ProcessedLogits,
    gather_logprobs,
    largest,
    raw_logits,
    raw_logprobs,
)
from rustvllm.sample.metadata import SamplingMetadata
from rustvllm.sample.sampler import Sampler


def metadata(rows, num_logprobs):
    rows = np.asarray(rows, np.int32)
    return LogprobsMetadata(torch.from_numpy(rows.astype(np.int64)), rows, np.asarray(num_logprobs, np.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(3))
def test_they_are_those_of_a_plain_softmax(seed, dtype):
    torch.manual_seed(seed)
    logits = (torch.randn(6, 40) * 4).to(dtype)
    wanted = metadata([0, 2, 3, 5], [3, 0, 20, 7])
    token_ids = torch.randint(0, 40, (6,))
    gathered = gather_logprobs(raw_logprobs(logits, wanted), token_ids, wanted)
    got = gathered.arrays(gathered.tensors)
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


def test_they_are_of_the_logits_before_the_sampler_changes_them():
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    wanted = metadata([0], [3])
    masked = SamplingMetadata(masked_rows=torch.tensor([0]), masked_ids=torch.tensor([1]), logprobs=wanted)
    raw = raw_logprobs(logits, wanted)
    token_ids = Sampler().sample(logits, masked)
    gathered = gather_logprobs(raw, token_ids, wanted)
    got = gathered.arrays(gathered.tensors)
    assert got.token_ids.tolist() == [[2, 1, 2, 0]]
    assert got.ranks.tolist() == [2]
    expected = torch.tensor([1.0, 3.0, 1.0, 0.0]) - torch.tensor([0.0, 3.0, 1.0]).logsumexp(0)
    assert got.logprobs[0] == pytest.approx(expected.numpy(), abs=1e-6)


def test_more_than_the_vocabulary_and_what_cannot_be():
    logits = torch.tensor([[0.0, -torch.inf], [torch.nan, 1.0]])
    wanted = metadata([0, 1], [5, 5])
    gathered = gather_logprobs(raw_logprobs(logits, wanted), torch.tensor([0, 0]), wanted)
    got = gathered.arrays(gathered.tensors)
    assert got.token_ids.shape == (2, 3)
    assert got.logprobs[0].tolist() == [0.0, 0.0, -np.inf]
    assert np.isnan(got.logprobs[1]).all()


def test_processed_ones_are_what_is_drawn_from():
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
    gathered = gather_logprobs(processed.values.log_softmax(dim=-1), token_ids, wanted)
    got = gathered.arrays(gathered.tensors)
    assert np.isneginf(got.logprobs[1][4:]).all()
    assert np.exp(got.logprobs[1][1:4].astype(np.float64)).sum() == pytest.approx(1)
    greedy = ProcessedLogits(wanted)
    Sampler().sample(logits.clone(), SamplingMetadata(logprobs=wanted, processed=greedy))
    assert torch.equal(greedy.values, logits[[0, 1, 3]])
    assert torch.equal(raw_logits(logits, wanted), logits[[0, 1, 3]])


@pytest.mark.parametrize("steps", [4, 1 << 20])  # of many steps hardly any two numbers are equal
def test_of_equal_candidates_the_first_ids_are_taken_however_many_are_asked_for(steps):
    random = np.random.default_rng(5)
    values = torch.from_numpy(random.integers(-steps, steps - 1, (40, 300)).astype(np.float32) / steps - 1)
    values[3, :7] = -torch.inf
    values[4, 10:20] = values[5, 290:] = 1.0
    values[6, ::2], values[6, 1::2] = 0.0, -0.0
    for count in (0, 1, 3, 5, 20, 299, 300):
        found, ids = largest(values, count)
        for row, of_row in enumerate(values.tolist()):
            expected = sorted(range(300), key=lambda place, of_row=of_row: (-of_row[place], place))[:count]
            assert ids[row].tolist() == expected
            assert found[row].tolist() == [of_row[place] for place in expected]
