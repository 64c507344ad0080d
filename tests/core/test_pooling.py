"""Vectors at the boundary: an array in, bytes out with the end; what does not fit is refused and changes nothing."""

import numpy as np
import pytest

from rustvllm import _core
from rustvllm.exceptions import SchedulerStateError

POOLED = np.array([[-9]], np.int32)
VECTOR = np.array([[1.5, -2.0, 0.25]], np.float32)


@pytest.fixture
def engine():
    """A scheduler with one request that fills its whole context, and what reads its output."""
    scheduler = _core.Scheduler(_core.SchedulerConfig(num_blocks=16, max_model_len=32, block_size=4))
    processor, key = _core.OutputProcessor(), scheduler.handle.new_key()
    processor.add_request(key, [1] * 32, at_the_end=True)
    scheduler.handle.add_request(key, "a", [1] * 32, max_tokens=0, pooling=1)
    return scheduler, processor


def test_a_request_ends_with_its_vector(engine):
    scheduler, processor = engine
    output = scheduler.schedule()
    assert (output.num_sampled, output.num_logits) == (1, 1)
    assert scheduler.update_from_output(output, POOLED, pooled=VECTOR) == 1
    _, [delta] = processor.poll(scheduler.handle)
    assert (delta.finish_reason, delta.new_token_ids) == ("stop", [])
    np.testing.assert_array_equal(np.frombuffer(delta.pooled, np.float32), VECTOR[0])
    assert scheduler.schedule() is None


@pytest.mark.parametrize(
    ("pooled", "error", "message"),
    [
        (None, SchedulerStateError, "a sample is pooled, but there are no rows"),
        (np.zeros((2, 3), np.float32), SchedulerStateError, "not one row for each sample"),
        (np.zeros((0, 3), np.float32), SchedulerStateError, "not one row for each sample"),
        (np.zeros((1, 0), np.float32), SchedulerStateError, "there are no rows"),
        (np.zeros((1, 3)), TypeError, "pooled must be an array of dtype float32"),
        (np.zeros((1, 3), ">f4"), TypeError, "pooled must be an array of dtype float32"),
        (np.zeros(3, np.float32), ValueError, "pooled must have 2 dimensions"),
        ([[1.0]], TypeError, "pooled must be an array of dtype float32"),
    ],
    ids=range(8),
)
def test_what_does_not_fit_changes_nothing(engine, pooled, error, message):
    scheduler, processor = engine
    output = scheduler.schedule()
    with pytest.raises(error, match=message):
        scheduler.update_from_output(output, POOLED, pooled=pooled)
    assert processor.poll(scheduler.handle) == ([], [])
    assert scheduler.update_from_output(output, POOLED, pooled=VECTOR) == 1


def test_a_request_that_generates_has_none():
    scheduler = _core.Scheduler(_core.SchedulerConfig(num_blocks=16, max_model_len=32, block_size=4))
    processor, key = _core.OutputProcessor(), scheduler.handle.new_key()
    processor.add_request(key, [1, 2])
    scheduler.handle.add_request(key, "a", [1, 2], max_tokens=1)
    scheduler.update_from_output(scheduler.schedule(), np.array([[7]], np.int32))
    _, [delta] = processor.poll(scheduler.handle)
    assert (delta.pooled, delta.new_token_ids) == (None, [7])
