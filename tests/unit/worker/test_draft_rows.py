"""Which rows of logits belong to drafts, and which drafts are kept: arrays against one request at a time."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rustvllm.sample.metadata import SamplingMetadata
from rustvllm.sample.sampler import Sampler
from rustvllm.worker.drafts.rows import NO_DRAFT, DraftRows, draft_rows
from rustvllm.worker.drafts.verify import DeviceDrafts, add_counts
from rustvllm.worker.step_buffers import StepBuffers


class Staging(StepBuffers):
    """A step of the CPU: what is staged is there."""

    def __init__(self):
        self._mirror = self._streams = None


def make_rows(all_drafts):
    num_logits = [1 + len(drafts) for drafts in all_drafts]
    requests = np.repeat(np.arange(len(all_drafts)), num_logits)
    depths = np.concatenate([np.arange(count) for count in num_logits])
    drafts = np.full((len(all_drafts), max(num_logits) - 1), NO_DRAFT, np.int64)
    for row, each in zip(drafts, all_drafts, strict=True):
        row[: len(each)] = each
    return DraftRows(requests, depths, drafts)


def accepted_one_by_one(all_drafts, sampled):
    rows, start = [], 0
    for drafts in all_drafts:
        ids = list(sampled[start : start + 1 + len(drafts)])
        start += 1 + len(drafts)
        kept = [ids[0]]
        while len(kept) <= len(drafts) and kept[-1] == drafts[len(kept) - 1]:
            kept.append(ids[len(kept)])
        rows.append(kept)
    return rows


@pytest.mark.parametrize("seed", range(40))
def test_drafts_are_kept_while_they_are_what_was_sampled(seed):
    random = np.random.default_rng(seed)
    all_drafts = [random.integers(0, 2, random.integers(0, 5)).tolist() for _ in range(random.integers(1, 6))]
    all_drafts.append([1])
    rows = make_rows(all_drafts)
    sampled = random.integers(0, 2, len(rows.requests)).astype(np.int32)
    sampled[random.random(sampled.size) < 0.1] = -1  # no number among the logits
    expected = accepted_one_by_one(all_drafts, sampled)
    on_device, last = DeviceDrafts(rows, Staging()).accept(torch.from_numpy(sampled))
    for ids in (rows.accept(sampled), on_device.numpy()):
        assert ids.dtype == np.int32
        assert ids.shape == (len(all_drafts), 1 + rows.drafts.shape[1])
        padded = [kept + [-1] * (ids.shape[1] - len(kept)) for kept in expected]
        assert ids.tolist() == padded
    known = [[token_id for token_id in kept if token_id >= 0] for kept in expected]
    assert last.tolist() == [kept[-1] if kept else 0 for kept in known]


def test_rows_are_read_from_the_arrays_of_a_step():
    # Of four requests the second is in the middle of its prompt, and the third has no drafts.
    arrays = {
        "idx_mapping": np.array([5, 1, 7, 2], np.int32),
        "sampled_rows": np.array([5, 7, 2], np.int32),
        "num_draft_tokens": np.array([2, 0, 0, 1], np.int32),
        "logits_indices": np.array([0, 1, 2, 6, 7, 8], np.int32),
        "input_ids": np.array([10, 11, 12, 0, 0, 0, 20, 30, 31], np.int32),
    }
    rows = draft_rows(SimpleNamespace(num_reqs=4, num_sampled=3, num_logits=6), arrays)
    assert rows.requests.tolist() == [0, 0, 0, 1, 2, 2]
    assert rows.depths.tolist() == [0, 1, 2, 0, 0, 1]
    assert rows.drafts.tolist() == [[11, 12], [NO_DRAFT, NO_DRAFT], [31, NO_DRAFT]]
    assert rows.first.tolist() == [0, 3, 4]
    assert rows.places.tolist() == [0, 1, 2, 3, 6, 7]
    assert rows.starts.tolist() == [0, 3, 4, 6]
    assert rows.ids.tolist() == [NO_DRAFT, 11, 12, NO_DRAFT, NO_DRAFT, 31]
    assert draft_rows(SimpleNamespace(num_reqs=4, num_sampled=3, num_logits=3), arrays) is None


def test_drafts_before_a_row_count_for_it_alone():
    rows = make_rows([[4, 4, 5], [], [6]])
    counts = torch.zeros((5, 8), dtype=torch.int32)
    # No draft comes before the first of these rows, two before the second, three before the third.
    places, ids = rows.earlier(np.array([0, 2, 3, 4, 6]))
    pairs = list(zip(places.tolist(), ids.tolist(), strict=True))
    assert pairs == [(1, 4), (1, 4), (2, 4), (2, 4), (2, 5), (4, 6)]
    add_counts(counts, torch.from_numpy(places), torch.from_numpy(ids))
    assert counts[1, 4] == 2
    assert counts[2].tolist() == [0, 0, 0, 0, 2, 1, 0, 0]


def test_endings_move_on_by_the_drafts_before_a_row():
    drafts = DeviceDrafts(make_rows([[4, 5, 6], [7]]), Staging())
    endings = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3], [8, 9, 10]])
    pushed = drafts.push(endings, torch.tensor([0, 2, 3, 5]))
    assert pushed.tolist() == [[1, 2, 3], [3, 4, 5], [4, 5, 6], [9, 10, 7]]


NUM_IDS, NUM_REQUESTS, NUM_DRAFTS, NUM_DRAWN = 10, 500, 3, 100_000
MOST_CHI_SQUARE = 27.9
"""Nine degrees of freedom exceed it once in a thousand times."""


def drawn_with_drafts(accept, adversary):
    """How often each id was given in steps whose drafts an adversary chose, after what had been given before."""
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, -2.0, -2.5])
    counts = np.zeros(NUM_IDS, np.int64)
    positions = np.zeros(NUM_REQUESTS, np.int64)
    newest = np.zeros(NUM_REQUESTS, np.int64)
    sampler = Sampler()
    num_kept = 0
    while counts.sum() < NUM_DRAWN:
        rows = make_rows([[adversary(int(token_id))] * NUM_DRAFTS for token_id in newest])
        num_rows = len(rows.requests)
        metadata = SamplingMetadata(
            random_rows=torch.arange(num_rows),
            temperature=torch.ones(num_rows),
            seeds=torch.from_numpy(rows.requests + 17),
            positions=torch.from_numpy(positions[rows.requests] + rows.depths),
        )
        sampled = sampler.sample(logits.repeat(num_rows, 1), metadata).numpy().astype(np.int32)
        ids = accept(rows, sampled)
        given = ids[ids >= 0]
        num_kept += given.size - NUM_REQUESTS
        counts += np.bincount(given, minlength=NUM_IDS)
        lengths = (ids >= 0).sum(axis=1)
        positions += lengths
        newest = ids[np.arange(NUM_REQUESTS), lengths - 1].astype(np.int64)
    assert num_kept > 0, "drafts were accepted"
    expected = counts.sum() * logits.softmax(0).numpy()
    return ((counts - expected) ** 2 / expected).sum()


ADVERSARIES = {
    "the likeliest": lambda newest: 0,
    "the least likely": lambda newest: NUM_IDS - 1,
    "the same again": lambda newest: newest,
    "another one": lambda newest: (newest + 1) % NUM_IDS,
}


@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_no_adversary_bends_what_is_drawn(adversary):
    assert drawn_with_drafts(DraftRows.accept, ADVERSARIES[adversary]) < MOST_CHI_SQUARE


def test_the_count_would_see_a_draft_that_is_kept_though_another_id_was_drawn():
    def keep_first(rows, sampled):
        ids = rows.accept(sampled)
        wrong = (rows.drafts[:, 0] != ids[:, 0]) & (np.arange(len(ids)) % 100 == 0)
        ids[wrong, 0] = rows.drafts[wrong, 0]
        return ids

    assert drawn_with_drafts(keep_first, ADVERSARIES["the least likely"]) > MOST_CHI_SQUARE
