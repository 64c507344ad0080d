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
