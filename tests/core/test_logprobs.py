"""Log-probabilities at the boundary: arrays in, deltas out, and what does not fit is refused and changes nothing."""

import numpy as np
import pytest

from rustvllm import _core
from rustvllm.exceptions import SchedulerStateError

GOOD = (
    np.array([0], np.int32),
    np.array([[7, 3, -1]], np.int32),
    np.array([[-1.5, -0.25, 0.0]], np.float32),
    np.array([4], np.int32),
)


@pytest.fixture
def scheduler():
    scheduler = _core.Scheduler(_core.SchedulerConfig(num_blocks=16, max_model_len=32, block_size=4))
    scheduler.add_request("a", [1, 2, 3], max_tokens=2, num_logprobs=1)
    return scheduler


def replaced(place, array):
    return (*GOOD[:place], array, *GOOD[place + 1 :])


def test_a_delta_has_them_with_its_token(scheduler):
    processor = _core.OutputProcessor()
    scheduler = _core.Scheduler(_core.SchedulerConfig(num_blocks=16, max_model_len=32, block_size=4))
    handle = scheduler.handle
    key = handle.new_key()
    processor.add_request(key, [1, 2, 3], logprobs=True)
    handle.add_request(key, "a", [1, 2, 3], max_tokens=2, num_logprobs=1)
    for _ in range(2):
        scheduler.update_from_output(scheduler.schedule(), np.array([[7]], np.int32), logprobs=GOOD)
    _, [delta] = processor.poll(handle)
    assert delta.new_token_ids == [7, 7]
    assert delta.new_logprobs == [(0, [(7, -1.5, 4, None), (3, -0.25, 1, None)])] * 2
    assert delta.finish_reason == "length"


@pytest.mark.parametrize(
    ("logprobs", "error", "message"),
    [
        (replaced(0, np.array([1], np.int32)), SchedulerStateError, "logprobs of step 1 do not fit"),
        (replaced(0, np.array([-1], np.int32)), SchedulerStateError, "not the one that was sampled at its place"),
        (replaced(0, np.array([0, 0], np.int32)), SchedulerStateError, "different numbers of rows"),
        (replaced(1, np.array([[8, 3, -1]], np.int32)), SchedulerStateError, "not the one that was sampled"),
        (replaced(1, np.zeros((1, 2), np.int32)), SchedulerStateError, "different numbers of rows or columns"),
        (replaced(3, np.zeros(0, np.int32)), SchedulerStateError, "different numbers of rows"),
        (replaced(0, np.array([0])), TypeError, "places of logprobs must be an array of dtype int32"),
        (replaced(1, GOOD[2]), TypeError, "token ids of logprobs must be an array of dtype int32"),
        (replaced(2, GOOD[2].astype(np.float64)), TypeError, "values of logprobs must be an array of dtype float32"),
        (replaced(3, [4]), TypeError, "ranks of logprobs must be an array of dtype int32"),
        (GOOD[:3], (TypeError, ValueError), "length 4"),
        (7, TypeError, "tuple"),
    ],
)
def test_what_does_not_fit_changes_nothing(scheduler, logprobs, error, message):
    output = scheduler.schedule()
    before = scheduler.request_state("a")
    with pytest.raises(error, match=message):
        scheduler.update_from_output(output, np.array([[7]], np.int32), logprobs=logprobs)
    assert scheduler.request_state("a") == before
    scheduler.check_invariants()
    assert scheduler.update_from_output(output, np.array([[7]], np.int32), logprobs=GOOD) == 0


def test_events_have_no_place_for_them():
    with pytest.raises(ValueError, match="no place for logprobs"):
        _core.OutputProcessor().add_request(1, [1], event_template=(b"", b""), logprobs=True)


PROMPT_GOOD = (
    np.array([2], np.int32),
    np.array([2, 9, 3, -1], np.int32),
    np.array([-1.5, -0.25, -2.5, 0.0], np.float32),
    np.array([4, 1], np.int32),
)


def test_a_delta_has_those_of_the_prompt_with_the_first_token():
    processor = _core.OutputProcessor()
    config = _core.SchedulerConfig(
        num_blocks=16, max_model_len=32, block_size=4, max_num_seqs=2, max_num_batched_tokens=2
    )
    scheduler = _core.Scheduler(config)
    handle = scheduler.handle
    key = handle.new_key()
    processor.add_request(key, [1, 2, 3], prompt_logprobs=True)
    handle.add_request(key, "a", [1, 2, 3], max_tokens=2, num_prompt_logprobs=1)
    first = scheduler.schedule()
    arrays = scheduler.step_buffers[first.buffer_index]
    assert (first.num_prompt_logprobs_reqs, first.num_prompt_logprobs) == (1, 2)
    assert arrays["prompt_logprobs_indices"][:2].tolist() == [0, 1]
    assert arrays["prompt_logprobs_targets"][:2].tolist() == [2, 3]  # the last is of the next chunk
    nothing = np.zeros((0, 1), np.int32)
    with pytest.raises(SchedulerStateError, match="prompt_logprobs of step 1"):
        scheduler.update_from_output(first, nothing)
    scheduler.update_from_output(first, nothing, prompt_logprobs=PROMPT_GOOD)
    assert processor.poll(handle) == ([], [])
    second = scheduler.schedule()
    assert second.num_prompt_logprobs == 0
    scheduler.update_from_output(second, np.array([[7]], np.int32))
    _, [delta] = processor.poll(handle)
    [(place, num_columns, ids, values, ranks)] = delta.new_prompt_logprobs
    assert (place, num_columns, delta.new_token_ids) == (1, 2, [7])
    assert np.frombuffer(ids, np.int32).tolist() == PROMPT_GOOD[1].tolist()
    assert np.frombuffer(values, np.float32).tolist() == PROMPT_GOOD[2].tolist()
    assert np.frombuffer(ranks, np.uint32).tolist() == [4, 1]


@pytest.mark.parametrize(
    ("place", "array", "error", "message"),
    [
        (0, np.array([3], np.int32), SchedulerStateError, "wider than the arrays are long"),
        (1, np.array([2, 9, 4, -1], np.int32), SchedulerStateError, "not the prompt's at its place"),
        (3, np.array([4], np.int32), SchedulerStateError, "not one row for each place"),
        (0, np.array([2]), TypeError, "columns of prompt_logprobs must be an array of dtype int32"),
        (2, PROMPT_GOOD[2].astype(np.float64), TypeError, "values of prompt_logprobs must be an array of dtype"),
        (3, [4, 1], TypeError, "ranks of prompt_logprobs must be an array of dtype int32"),
    ],
)
def test_what_does_not_fit_the_prompt_changes_nothing(place, array, error, message):
    scheduler = _core.Scheduler(_core.SchedulerConfig(num_blocks=16, max_model_len=32, block_size=4))
    scheduler.add_request("a", [1, 2, 3], max_tokens=2, num_prompt_logprobs=1)
    output = scheduler.schedule()
    wrong = (*PROMPT_GOOD[:place], array, *PROMPT_GOOD[place + 1 :])
    sampled = np.array([[7]], np.int32)
    with pytest.raises(error, match=message):
        scheduler.update_from_output(output, sampled, prompt_logprobs=wrong)
    scheduler.check_invariants()
    assert scheduler.update_from_output(output, sampled, prompt_logprobs=PROMPT_GOOD) == 0
