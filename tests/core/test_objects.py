"""The number of Python objects that a step makes does not depend on the number of requests."""

import gc
import sys

import numpy as np
import pytest
from hand_engine import make_scheduler

NUM_STEPS = 50


def count_objects(num_running, depth):
    """Growth of the interpreter's count of memory blocks over steps whose outputs are kept, per step."""
    scheduler = make_scheduler(
        num_blocks=16384, max_num_seqs=1024, max_num_batched_tokens=16384, max_steps_in_flight=depth,
        enable_prefix_caching=False,
    )  # fmt: skip
    for i in range(num_running):
        # Prompts of many lengths: some requests cross into a new block in every step.
        scheduler.add_request(str(i), [1 + i % 7] * (1 + i % 16), max_tokens=200)
    sampled = np.full((1024, 1), 7, np.int32)
    in_flight = [scheduler.schedule() for _ in range(depth - 1)]

    def run():
        outputs = []
        for _ in range(NUM_STEPS):
            in_flight.append(scheduler.schedule())
            oldest = in_flight.pop(0)
            assert oldest.num_reqs == num_running
            scheduler.update_from_output(oldest, sampled[: oldest.num_sampled])
            outputs.append(oldest)
        return outputs

    run()
    assert len(scheduler.take_outputs()) > 0
    gc.collect()
    gc.disable()
    try:
        before = sys.getallocatedblocks()
        kept = run()
        growth = sys.getallocatedblocks() - before
    finally:
        gc.enable()
    assert len(kept) == NUM_STEPS
    return growth / NUM_STEPS


@pytest.mark.parametrize("depth", [1, 2])
def test_one_request_and_1024_make_as_many_objects(depth):
    count_objects(1, depth)  # fills the interpreter's free lists
    one, many = count_objects(1, depth), count_objects(1024, depth)
    assert 0 < one < 4, "the output is one object, with a few numbers at most"
    assert abs(one - many) <= 10 / NUM_STEPS
