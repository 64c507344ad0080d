"""The updates that batch processors get: applied one after the other they turn one batch into the next."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rustvllm.sample.logits_processors import LogitsProcessor, MoveDirectionality
from rustvllm.sample.processor_batch import FollowedRequest, ProcessorBatch, batch_update
from rustvllm.sampling_params import SamplingParams


def followed(number):
    return FollowedRequest(SamplingParams(seed=number), [number], [])


REQUESTS = [followed(number) for number in range(9)]
BATCHES = st.lists(st.lists(st.sampled_from(range(9)), unique=True), max_size=8)


def apply(places, update):
    """What vLLM's processors do with an update."""
    for index in update.removed:
        del places[index]
    for index, _, prompt, _ in update.added:
        places[index] = prompt[0]
    for one, other, how in update.moved:
        a, b = places.pop(one), places.pop(other, None)
        places[other] = a
        assert (b is not None) == (how is MoveDirectionality.SWAP)
        if b is not None:
            places[one] = b


@given(BATCHES)
def test_updates_lead_from_batch_to_batch(batches):
    places, old = {}, []
    for numbers in batches:
        new = [REQUESTS[number] for number in numbers]
        update = batch_update(old, new)
        assert update.batch_size == len(new)
        assert not {index for index, *_ in update.added} & set(update.removed)
        assert sorted(prompt[0] for _, _, prompt, _ in update.added) == sorted(
            request.prompt_token_ids[0] for request in new if request not in old
        )
        apply(places, update)
        assert places == dict(enumerate(numbers))
        old = new


class Counting(LogitsProcessor):
    def __init__(self, config=None, device=None, is_pin_memory=False):
        self.updates = []

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        self.updates.append(batch_update)

    def apply(self, logits):
        return logits


def test_the_same_batch_is_no_update_and_a_new_tenant_of_a_row_is():
    processor = Counting()
    batch = ProcessorBatch([processor])
    rows = np.array([4, 2], np.int32)
    for row, number in ((2, 0), (4, 1)):
        batch.admit(row, followed(number))
    batch.arrange(rows)
    batch.arrange(rows)
    assert [update is None for update in processor.updates] == [False, True]
    batch.drop(np.array([4], np.int32))
    batch.admit(4, followed(7))
    batch.arrange(rows)
    assert [(index, prompt) for index, _, prompt, _ in processor.updates[-1].added] == [(0, [7])]
    assert processor.updates[-1].removed == processor.updates[-1].moved == ()


def test_outputs_grow_in_place_and_only_of_rows_that_were_sampled():
    batch = ProcessorBatch([Counting()])
    requests = {row: followed(row) for row in (0, 1, 2)}
    for row, request in requests.items():
        batch.admit(row, request)
    batch.append(np.array([2, 0], np.int32), torch.tensor([8, 9]))
    assert [requests[row].output_token_ids for row in (0, 1, 2)] == [[9], [], [8]]


@pytest.mark.parametrize("result", [None, torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.int64)])
def test_a_class_that_returns_no_logits_fails_the_step(result):
    processor = Counting()
    processor.apply = lambda logits: result
    batch = ProcessorBatch([processor])
    batch.admit(0, followed(0))
    batch.admit(1, followed(1))
    rows = batch.arrange(np.array([0, 1], np.int32))
    with pytest.raises(TypeError, match=r"Counting.apply must return logits of shape \[2, 3\]"):
        rows.apply_before(torch.zeros(2, 3))


def test_no_request_is_followed_without_processors():
    batch = ProcessorBatch()
    batch.admit(0, followed(0))
    assert batch.arrange(np.array([0], np.int32)) is None
    batch.append(np.array([0], np.int32), torch.tensor([1]))
