"""Misuse raises a named exception, changes nothing, and the requests end as if nothing had happened."""

import sys
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hand_engine import HandEngine, make_scheduler, tokens

from rustvllm import _core
from rustvllm.exceptions import SchedulerStateError, WrongThreadError


@pytest.fixture(params=[1, 2], ids=["one step in flight", "two steps in flight"])
def engine(request):
    """Three requests, with as many steps in flight as there may be."""
    engine = HandEngine(block_size=4, max_steps_in_flight=request.param, max_num_seqs=8)
    for i in range(1, 4):
        engine.add(str(i), range(i, i + 6), max_tokens=9)
    for _ in range(3):  # so that no set is fresh
        engine.step()
    for _ in range(request.param):
        engine.schedule()
    return engine


def check_unharmed(engine):
    engine.scheduler.check_invariants()
    engine.finish()


@pytest.mark.parametrize(
    ("sampled", "error", "message"),
    [
        (np.zeros((2, 1), np.int32), SchedulerStateError, "must have 3 rows, one per sampled request of step 4, got 2"),
        (np.zeros((4, 1), np.int32), SchedulerStateError, "must have 3 rows.*got 4"),
        (np.zeros((0, 1), np.int32), SchedulerStateError, "must have 3 rows.*got 0"),
        (np.zeros((3, 0), np.int32), SchedulerStateError, "must have 3 rows"),
        (np.zeros(2, np.int32), SchedulerStateError, "must have 3 rows.*got 2"),
        (np.zeros((3, 1, 1), np.int32), ValueError, "sampled_token_ids must have 1 or 2 dimensions"),
        (np.zeros((), np.int32), TypeError, "dtype int32"),
        (np.zeros((3, 1), np.int64), TypeError, "sampled_token_ids must be an array of dtype int32"),
        (np.zeros((3, 1), np.uint32), TypeError, "dtype int32"),
        (np.zeros((3, 1), np.float32), TypeError, "dtype int32"),
        (np.zeros((3, 1), ">i4"), TypeError, "dtype int32"),
        (np.zeros((3, 1), object), TypeError, "dtype int32"),
        ([[1], [2], [3]], TypeError, "dtype int32"),
        (b"\0" * 12, TypeError, "dtype int32"),
        (None, TypeError, "dtype int32"),
    ],
)
def test_sampled_ids_of_the_wrong_form(engine, sampled, error, message):
    output, _ = engine.in_flight[0]
    before = [engine.state(str(i)) for i in range(1, 4)]
    with pytest.raises(error, match=message):
        engine.scheduler.update_from_output(output, sampled)
    assert [engine.state(str(i)) for i in range(1, 4)] == before
    check_unharmed(engine)


@pytest.mark.parametrize(
    ("drafts", "error", "message"),
    [
        (np.zeros((3, 1), np.int32), SchedulerStateError, "drafts have 1 columns; the limit is 0"),
        (np.zeros((2, 1), np.int32), SchedulerStateError, "must have 3 rows"),
        (np.zeros((3, 1), np.int64), TypeError, "draft_token_ids must be an array of dtype int32"),
        (np.zeros((3, 1, 1), np.int32), ValueError, "draft_token_ids must have 1 or 2 dimensions"),
        ([1, 2, 3], TypeError, "draft_token_ids must be an array of dtype int32"),
    ],
)
def test_drafts_of_the_wrong_form(engine, drafts, error, message):
    output, sampled = engine.in_flight[0]
    with pytest.raises(error, match=message):
        engine.scheduler.update_from_output(output, sampled, drafts)
    check_unharmed(engine)


def test_more_drafts_than_there_may_be():
    scheduler = make_scheduler(num_speculative_tokens=2)
    scheduler.add_request("a", [1, 2, 3], max_tokens=3)
    output = scheduler.schedule()
    with pytest.raises(SchedulerStateError, match="drafts have 3 columns; the limit is 2"):
        scheduler.update_from_output(output, tokens(output), np.zeros((1, 3), np.int32))
    scheduler.check_invariants()
    assert scheduler.update_from_output(output, tokens(output), np.zeros((1, 2), np.int32)) == 0


@pytest.mark.parametrize(
    ("numbers", "error", "message"),
    [
        ((0, 4, 2), ValueError, "patterns of 1 to 1024 tokens, got min_pattern_size 0 and max_pattern_size 4"),
        ((5, 4, 2), ValueError, "got min_pattern_size 5 and max_pattern_size 4"),
        ((1, 1025, 2), ValueError, "max_pattern_size 1025"),
        ((1, 4, 1), ValueError, "min_count of repetition_detection must be at least 2, got 1"),
        ((1, 4, -1), OverflowError, "out of range"),
        ((1, 4), ValueError, "length 3"),
        (5, TypeError, "repetition_detection"),
    ],
)
def test_repetitions_that_cannot_be_looked_for(numbers, error, message):
    scheduler = make_scheduler()
    with pytest.raises(error, match=message):
        scheduler.add_request("a", [1, 2, 3], max_tokens=3, repetition_detection=numbers)
    scheduler.check_invariants()
    assert scheduler.schedule() is None
    scheduler.add_request("a", [1, 2, 3], max_tokens=9, repetition_detection=(1, 4, 2))
    for num_finished in (0, 1):
        output = scheduler.schedule()
        assert scheduler.update_from_output(output, tokens(output)) == num_finished
    assert scheduler.stats()["num_finished_repetition"] == 1


def test_rows_may_lie_apart_in_memory(engine):
    output, sampled = engine.in_flight[0]
    wide = np.full((3, 4), -1, np.int32)
    wide[:, ::2] = sampled
    engine.in_flight[0] = output, wide[:, ::4]
    check_unharmed(engine)


def test_an_update_twice_and_stale_outputs(engine):
    scheduler = engine.scheduler
    oldest, sampled = engine.in_flight[0]
    oldest_set = oldest.buffer_index
    engine.update()
    for _ in range(2 * len(scheduler.step_buffers)):
        with pytest.raises(SchedulerStateError, match=f"step {oldest.step} cannot be updated"):
            scheduler.update_from_output(oldest, sampled)
        with pytest.raises(SchedulerStateError, match=f"step {oldest.step} cannot be updated"):
            scheduler.fail_step(oldest)
        with pytest.raises(SchedulerStateError, match=f"step {oldest.step} is not the last one in flight"):
            scheduler.truncate_drafts(oldest, [0] * oldest.num_reqs)
        with pytest.raises(SchedulerStateError, match=f"step {oldest.step} has been updated; its debug view is gone"):
            oldest.debug_view()
        scheduler.check_invariants()
        following = engine.schedule()
        if following.buffer_index == oldest_set:
            break
        engine.update()
    else:
        pytest.fail("the set was never used again")
    # The set of the old output holds another step now: the number of the step tells them apart.
    with pytest.raises(SchedulerStateError, match=f"step {oldest.step} cannot be updated"):
        scheduler.update_from_output(oldest, sampled)
    check_unharmed(engine)


def test_an_output_of_another_scheduler(engine):
    other = make_scheduler()
    other.add_request("a", [1, 2, 3], max_tokens=3)
    foreign = other.schedule()
    for call in (
        lambda: engine.scheduler.update_from_output(foreign, tokens(foreign)),
        lambda: engine.scheduler.fail_step(foreign),
        lambda: engine.scheduler.truncate_drafts(foreign, [0]),
    ):
        with pytest.raises(SchedulerStateError, match="was made by another Scheduler"):
            call()
    for wrong in (None, 4, "4", object()):
        with pytest.raises(TypeError, match="SchedulerOutput"):
            engine.scheduler.update_from_output(wrong, tokens(foreign))
    check_unharmed(engine)
    assert other.update_from_output(foreign, tokens(foreign)) == 0


def test_an_output_cannot_be_made_or_changed_by_hand(engine):
    output, _ = engine.in_flight[0]
    with pytest.raises(TypeError):
        _core.SchedulerOutput()
    with pytest.raises(AttributeError):
        output.step = 1
    check_unharmed(engine)


@pytest.mark.parametrize(
    ("num_kept", "error", "message"),
    [
        ([0, 0], SchedulerStateError, "3 rows.*got 2"),
        ([], SchedulerStateError, "3 rows.*got 0"),
        ([0, 0, -1], OverflowError, None),
        ([0, 0, 2**40], OverflowError, None),
        (["0", "0", "0"], TypeError, None),
        (0, TypeError, "num_kept"),
    ],
)
def test_numbers_of_kept_drafts(engine, num_kept, error, message):
    newest, _ = engine.in_flight[-1]
    with pytest.raises(error, match=message):
        engine.scheduler.truncate_drafts(newest, num_kept)
    check_unharmed(engine)


def test_drafts_of_an_older_step_stay(engine):
    if len(engine.in_flight) == 1:
        pytest.skip("one step is the newest")
    older, _ = engine.in_flight[0]
    with pytest.raises(
        SchedulerStateError, match=r"step 4 is not the last one in flight; its drafts .* before the next"
    ):
        engine.scheduler.truncate_drafts(older, [0, 0, 0])
    check_unharmed(engine)


def test_names_that_no_request_has(engine):
    scheduler = engine.scheduler
    scheduler.abort_requests(["absent", "", "1 "])
    scheduler.handle.grammar_ready(10**9)
    scheduler.handle.grammar_failed(10**9)
    assert scheduler.request_state("absent") is None
    for row, error in ((7, ValueError), (2**31, ValueError), (-1, OverflowError), ("0", TypeError)):
        with pytest.raises(error):
            scheduler.token_ids(row)
    with pytest.raises(OverflowError):
        scheduler.handle.grammar_ready(-1)
    engine.add("forked", [9, 9, 9], fork_from=10**9)
    check_unharmed(engine)


def test_a_key_or_an_id_used_twice(engine):
    scheduler = engine.scheduler
    key = scheduler.add_request("1", [1, 2], max_tokens=2)
    (live,) = [key for key, (prompt, _) in engine._requests.items() if prompt[0] == 1]
    scheduler.handle.add_request(live, "fresh id", [1, 2], max_tokens=2)
    engine.update()
    assert engine.outputs[key][-1]["finish_reason"] == "error"
    assert scheduler.request_state("fresh id") is None
    check_unharmed(engine)


def test_requests_of_the_wrong_form(engine):
    scheduler = engine.scheduler
    for prompt, params, error in [
        (["1"], {}, TypeError),
        ([2**40], {}, OverflowError),
        (None, {}, TypeError),
        ([1], {"max_tokens": -1}, OverflowError),
        ([1], {"max_tokens": "9"}, TypeError),
        ([1], {"no_such_parameter": 1}, TypeError),
        ([1], {"samples": [(1, "a")]}, ValueError),
        ([1], {"fork_from": "p"}, TypeError),
        ([1], {"multimodal": [(0, 1, "text", b"")]}, TypeError),
        ([1], {"multimodal": [(0, 1, b"digest", "text")]}, TypeError),
        ([1], {"multimodal": [(0, 1, b"digest")]}, ValueError),
    ]:
        with pytest.raises(error):
            scheduler.add_request("x", prompt, **({"max_tokens": 2} | params))
        with pytest.raises(TypeError):
            scheduler.add_request("x", [1])
    assert scheduler.num_unfinished_requests() == 3
    check_unharmed(engine)


def test_two_threads_at_once():
    engine = HandEngine(max_num_seqs=4)
    for i in range(1, 5):
        engine.add(str(i), [i, 2, 3], max_tokens=200)
    scheduler, start, stop = engine.scheduler, threading.Barrier(2), threading.Event()
    caught, wrong = [], []
    engine.step()

    calls = [
        lambda _: scheduler.schedule(),
        lambda _: scheduler.reset_prefix_cache(preempt_running=True),
        lambda _: scheduler.set_pause_state("unpaused"),
        lambda _: scheduler.abort_all(),
        lambda output: scheduler.update_from_output(output, np.zeros((4, 1), np.int32)),
        scheduler.fail_step,
        lambda output: scheduler.truncate_drafts(output, [0] * 4),
        lambda _: scheduler.set_trace(True),
    ]

    def intrude():
        start.wait(10)
        while not stop.is_set():
            for call in calls:
                try:
                    call(first)
                    wrong.append("no error")
                except WrongThreadError as error:
                    caught.append(str(error))
                except BaseException as error:  # noqa: BLE001 -- reported by the assertion below
                    wrong.append(repr(error))
            scheduler.queues()
            scheduler.request_state("1")
            scheduler.stats()

    first = engine.schedule()
    thread = threading.Thread(target=intrude)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        thread.start()
        start.wait(10)
        for num_caught in range(20, 420, 20):  # the other gets its turns between and, if it can, within calls
            while thread.is_alive() and not wrong and len(caught) < num_caught:
                time.sleep(0.0001)
            engine.update()
            engine.schedule()
        engine.finish()
    finally:
        stop.set()
        thread.join(30)
        sys.setswitchinterval(before)
    assert wrong == []
    assert len(caught) >= 400
    assert "the scheduler belongs to" in caught[0]
    engine.check_idle()


def test_the_first_that_calls_is_the_owner():
    scheduler = make_scheduler()
    thread = threading.Thread(target=scheduler.schedule)
    thread.start()
    thread.join(10)
    with pytest.raises(WrongThreadError):
        scheduler.schedule()
    scheduler.check_invariants()


class Intruder(Sequence):
    """Numbers that call the scheduler while they are read."""

    def __init__(self, values, call):
        self.values, self.call = values, call

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        self.call()
        return self.values[index]


def test_calls_from_inside_a_call(engine):
    """Arguments that run code of their own while they are read see a scheduler between two calls."""
    scheduler, newest = engine.scheduler, engine.in_flight[-1][0]
    seen = []

    def call():
        seen.append(scheduler.queues()["running"])
        scheduler.check_invariants()
        with pytest.raises(SchedulerStateError, match="in flight"):
            scheduler.schedule()

    scheduler.add_request("x", Intruder([1, 2, 3], call), max_tokens=1)
    assert scheduler.prefix_hit_length(Intruder([1, 2, 3], call)) == 0
    same = scheduler.truncate_drafts(newest, Intruder([0, 0, 0], call))
    assert (same.step, same.total_num_scheduled_tokens) == (newest.step, newest.total_num_scheduled_tokens)
    assert len(seen) >= 9
    assert all(running == ["1", "2", "3"] for running in seen)
    check_unharmed(engine)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="objects with __buffer__ came with Python 3.12")
def test_an_array_that_calls_back_while_it_is_read(engine):
    output, sampled = engine.in_flight[0]
    caught = []

    class Array:
        def __buffer__(self, flags):
            try:
                engine.scheduler.schedule()
            except RuntimeError as error:
                caught.append(error)
            return memoryview(sampled)

    assert engine.scheduler.update_from_output(output, Array()) == 0
    assert len(caught) == 1
    engine.in_flight.popleft()
    check_unharmed(engine)


def test_arrays_must_stay_where_they_are():
    config = _core.SchedulerConfig(num_blocks=64, max_model_len=256)
    sets = [
        {name: np.zeros(shape, dtype) for name, dtype, shape in _core.step_buffer_spec(config)}
        for _ in range(config.num_buffer_sets)
    ]
    scheduler = _core.Scheduler(config, sets)
    with pytest.raises(ValueError, match="reference"):
        sets[0]["input_ids"].resize(1 << 20)
    del sets  # the scheduler keeps them alive
    scheduler.add_request("a", [1, 2, 3], max_tokens=2)
    output = scheduler.schedule()
    assert scheduler.step_buffers[output.buffer_index]["input_ids"][:3].tolist() == [1, 2, 3]


@pytest.mark.parametrize("max_steps_in_flight", [1, 2, 3])
def test_a_set_too_few_is_refused(max_steps_in_flight):
    config = _core.SchedulerConfig(num_blocks=64, max_model_len=256, max_steps_in_flight=max_steps_in_flight)
    sets = [
        {name: np.zeros(shape, dtype) for name, dtype, shape in _core.step_buffer_spec(config)}
        for _ in range(max_steps_in_flight)
    ]
    message = f"at least {max_steps_in_flight + 1} step buffer sets are needed .*, got {max_steps_in_flight}"
    with pytest.raises(ValueError, match=message):
        _core.Scheduler(config, sets)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"max_steps_in_flight": 0}, "max_steps_in_flight must be between 1 and 16, got 0"),
        ({"max_steps_in_flight": 17}, "max_steps_in_flight must be between 1 and 16, got 17"),
        ({"num_speculative_tokens": 65}, "num_speculative_tokens must be between 0 and 64, got 65"),
        ({"num_cpu_blocks": 2**27 + 1}, "num_cpu_blocks must be between 0 and 134217728"),
        ({"preemption_mode": "drop"}, "preemption_mode must be 'recompute' or 'swap', got \"drop\""),
    ],
)
def test_new_numbers_outside_their_limits(numbers, message):
    with pytest.raises(ValueError, match=message):
        _core.SchedulerConfig(num_blocks=64, max_model_len=256, **numbers)
