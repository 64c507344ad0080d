"""Two steps in flight: what is scheduled before the last step's tokens are known."""

import numpy as np
import pytest
from hand_engine import HandEngine, tokens

from rustvllm.exceptions import SchedulerStateError


def make(**numbers):
    return HandEngine(max_steps_in_flight=2, **({"block_size": 4} | numbers))


def test_three_sets_rotate_and_unknown_ids_are_markers():
    engine = make()
    engine.add("a", [1, 2, 3, 4, 5, 6], max_tokens=5)
    assert engine.scheduler.config.num_buffer_sets == len(engine.scheduler.step_buffers) == 3
    first, second = engine.schedule(), engine.schedule()
    assert [first.step, second.step] == [1, 2]
    assert [first.buffer_index, second.buffer_index] == [0, 1]
    arrays = engine.arrays(second)
    assert second.total_num_scheduled_tokens == 1
    assert arrays["input_ids"][0] == -1
    table = engine.state("a")["block_table"]
    assert (arrays["positions"][0], arrays["slot_mapping"][0]) == (6, table[1] * 4 + 2)
    state = engine.state("a")
    assert (state["num_tokens"], state["num_computed_tokens"]) == (6, 7)
    assert (state["num_output_placeholders"], state["num_steps_in_flight"]) == (2, 2)
    engine.update()
    state = engine.state("a")
    assert (state["num_tokens"], state["num_output_placeholders"], state["num_steps_in_flight"]) == (7, 1, 1)
    third = engine.schedule()
    assert third.buffer_index == 2
    assert engine.arrays(third)["input_ids"][0] == -1, "its token is in step 2, which is still in flight"
    engine.update()
    engine.update()
    fourth = engine.schedule()
    assert fourth.buffer_index == 0
    assert engine.arrays(fourth)["input_ids"][0] == 1008, "with nothing in flight the id is known"
    engine.finish()


def test_a_chunk_of_a_prompt_has_no_markers():
    engine = make(max_num_batched_tokens=4, max_num_seqs=2)
    engine.add("a", [9, 2, 3, 4, 5, 6], max_tokens=2)
    first, second = engine.schedule(), engine.schedule()
    assert engine.arrays(first)["input_ids"][:4].tolist() == [9, 2, 3, 4]
    assert engine.arrays(second)["input_ids"][:2].tolist() == [5, 6]
    assert (first.num_sampled, second.num_sampled) == (0, 1)
    engine.finish()


def test_a_third_step_is_refused_until_the_oldest_is_updated():
    engine = make()
    engine.add("a", [1, 2, 3], max_tokens=6)
    engine.schedule()
    engine.schedule()
    with pytest.raises(
        SchedulerStateError, match="step 1 is in flight, and max_steps_in_flight is 2; call update_from"
    ):
        engine.scheduler.schedule()
    engine.scheduler.check_invariants()
    engine.update()
    assert engine.schedule().step == 3
    engine.finish()


def test_updates_come_in_the_order_of_the_steps():
    engine = make()
    engine.add("a", [1, 2, 3], max_tokens=6)
    first, second = engine.schedule(), engine.schedule()
    with pytest.raises(SchedulerStateError, match="step 2 cannot be updated: the next step to update is 1"):
        engine.scheduler.update_from_output(second, tokens(second))
    with pytest.raises(SchedulerStateError, match="step 2 cannot be updated: the next step to update is 1"):
        engine.scheduler.fail_step(second)
    engine.scheduler.check_invariants()
    engine.update()
    with pytest.raises(SchedulerStateError, match="step 1 cannot be updated: the next step to update is 2"):
        engine.scheduler.update_from_output(first, tokens(first))
    engine.finish()


def test_no_step_is_wasted_at_max_tokens():
    engine = make()
    engine.add("a", [1, 2, 3, 4, 5, 6], max_tokens=100)
    engine.finish()
    stats = engine.scheduler.stats()
    assert (stats["num_steps"], stats["num_scheduled_tokens"]) == (100, 105)


def test_a_request_that_stops_in_the_first_of_two_steps_gets_nothing_from_the_second():
    engine = make()
    scheduler = engine.scheduler
    key = scheduler.add_request("a", [1, 2, 3], max_tokens=9, eos_token_id=5)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert scheduler.update_from_output(first, tokens(first, 5)) == 1
    assert scheduler.request_state("a") is None
    scheduler.check_invariants()
    assert scheduler.update_from_output(second, tokens(second, 8)) == 0
    assert [(r["key"], r["new_token_id"], r["finish_reason"]) for r in scheduler.take_outputs()] == [(key, 5, "stop")]
    assert scheduler.schedule() is None
    engine.check_idle()


def test_an_abort_in_flight_ends_the_request_at_once_and_its_row_is_used_again_later():
    engine = make(max_num_seqs=2)
    a, b = engine.add("a", [1, 2, 3], max_tokens=9), engine.add("b", [2, 2, 3], max_tokens=9)
    engine.schedule()
    row = engine.state("a")["row"]
    engine.schedule()
    engine.add("c", [3, 2, 3], max_tokens=2)
    engine.scheduler.abort_requests(["a"])
    engine.update()
    assert engine.scheduler.request_state("a") is None
    engine.take_outputs()
    assert [record["finish_reason"] for record in engine.outputs[a]] == ["abort"], "one record, once"
    third = engine.schedule()
    assert third.debug_view()["finished_req_ids"] == ["a"]
    assert engine.scheduler.queues()["running"] == ["b"], "step 2 is in flight and names the row"
    engine.update()
    engine.schedule()
    assert engine.state("c")["row"] == row
    engine.finish(aborted=[a])
    assert engine.outputs[b][-1]["finish_reason"] == "length"


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_what_is_preempted_in_flight_loses_no_token(swap, policy):
    engine = make(
        num_blocks=9,
        max_model_len=32,
        max_num_seqs=4,
        scheduling_policy=policy,
        enable_prefix_caching=False,
        **({"preemption_mode": "swap", "num_cpu_blocks": 12} if swap else {}),
    )
    for i, name in enumerate("abcd"):
        engine.add(name, range(i + 1, i + 8), max_tokens=16, priority=i % 2)
    preempted_in_flight = leaving = 0
    for _ in range(300):
        while len(engine.in_flight) < 2 and engine.schedule() is not None:
            leaving += bool(engine.scheduler.queues()["leaving"])
            states = [engine.scheduler.request_state(name) for name in "abcd"]
            preempted_in_flight += any(
                state and state["status"] in ("PREEMPTED", "SWAPPED") and state["num_steps_in_flight"]
                for state in states
            )
        if not engine.in_flight:
            break
        engine.update()
    engine.finish()
    assert preempted_in_flight > 0
    assert (leaving > 0) == swap
    stats = engine.scheduler.stats()
    assert stats["num_preemptions"] > 0
    assert (stats["num_swapped_out"] > 0) == swap


def test_a_failed_step_fails_what_came_after_it():
    engine = make()
    a, b = engine.add("a", [1, 2, 3], max_tokens=9), engine.add("b", [2, 2, 3], max_tokens=9)
    first = engine.schedule()
    engine.schedule()
    assert engine.scheduler.fail_step(first) == 2
    engine.in_flight.clear()
    records = engine.scheduler.take_outputs()
    assert sorted(record["key"] for record in records) == [a, b]
    assert all(record["finish_reason"] == "error" and "failed" in record["error"] for record in records)
    engine.check_idle()
    engine.add("c", [3, 2, 3])
    del engine._requests[a], engine._requests[b]
    engine.finish()


def test_two_steps_in_flight_give_the_tokens_of_one():
    rng = np.random.default_rng(0)
    requests = [(rng.integers(1, 50, rng.integers(1, 30)).tolist(), int(rng.integers(1, 20))) for _ in range(20)]
    for depth in (1, 2, 4):
        engine = HandEngine(
            block_size=4, num_blocks=20, max_model_len=64, max_num_seqs=6, max_num_batched_tokens=24,
            max_steps_in_flight=depth,
        )  # fmt: skip
        for i, (prompt, max_tokens) in enumerate(requests):
            engine.add(str(i), prompt, max_tokens)
        engine.finish()
