"""The debug face tells all: of the inbox, of blocks in large pools, of every output, and before the first step."""

import time

import numpy as np
import pytest

from rustvllm import _core
from rustvllm.exceptions import SchedulerStateError


def make_scheduler(**changes):
    return _core.Scheduler(_core.SchedulerConfig(**({"num_blocks": 64, "max_model_len": 256} | changes)))


def update(scheduler, output, token_id=7):
    scheduler.update_from_output(output, np.full((output.num_sampled, 1), token_id, np.int32))


def test_there_are_blocks_before_the_first_step():
    stats = make_scheduler().stats()
    assert (stats["num_usable_blocks"], stats["num_free_blocks"], stats["kv_cache_usage"]) == (63, 63, 0.0)


def test_what_has_arrived_is_in_the_queues():
    scheduler = make_scheduler()
    scheduler.add_request("a", [1] * 9, max_tokens=4)
    assert scheduler.queues() == {"running": [], "waiting": ["a"], "leaving": []}
    scheduler.add_request("b", [1] * 9, max_tokens=4)
    assert scheduler.request_state("b")["status"] == "WAITING"
    scheduler.abort_requests(["a"])
    assert scheduler.queues()["waiting"] == ["b"]
    assert [(output["request_id"], output["finish_reason"]) for output in scheduler.take_outputs()] == [("a", "abort")]


def test_a_step_says_who_samples():
    scheduler = make_scheduler(max_num_batched_tokens=16)
    scheduler.add_request("a", [1] * 9, max_tokens=4)
    scheduler.add_request("b", [2] * 9, max_tokens=4)
    view = scheduler.schedule().debug_view()
    assert (view["num_scheduled_tokens"], view["sampled_req_ids"]) == ({"a": 9, "b": 7}, ["a"])


def test_all_outputs_are_taken_with_the_ids_of_their_requests():
    scheduler = make_scheduler(max_num_seqs=2)
    keys = {scheduler.add_request(name, [1] * 3, max_tokens=40): name for name in "ab"}
    group = scheduler.handle.new_key()
    keys[scheduler.add_request("c", [1] * 3, max_tokens=2, samples=[(group, "c.1", 1)])] = "c"
    keys[group] = "c.1"
    late = scheduler.handle.new_key()
    scheduler.handle.add_request(late, "d", [1] * 3, max_tokens=2)
    while (output := scheduler.schedule()) is not None:
        update(scheduler, output)
    assert scheduler.stats()["num_held_back"] > 0, "more than one ring holds"
    outputs = scheduler.take_outputs()
    tokens = {name: [output for output in outputs if output["key"] == key] for key, name in keys.items()}
    assert {name: len(records) for name, records in tokens.items()} == {"a": 40, "b": 40, "c": 2, "c.1": 2}
    assert all(output["request_id"] == keys.get(output["key"]) for output in outputs)
    assert [output["request_id"] for output in outputs if output["key"] == late] == [None, None], "it has left"
    assert scheduler.take_outputs() == []
    assert not scheduler.has_unfinished_requests()


def test_the_states_of_many_blocks_are_one_walk():
    scheduler = make_scheduler(num_blocks=100_000)
    begin = time.process_time()
    states = scheduler.block_states()
    seconds = time.process_time() - begin
    assert [state["free_position"] for state in states] == [None, *range(99_999)]
    # A walk for each block took thirty seconds and more, one for all less than one.
    assert seconds < 10


def test_the_last_token_of_a_prompt_is_no_hit():
    scheduler = make_scheduler(block_size=4)
    scheduler.add_request("a", list(range(8)), max_tokens=1)
    update(scheduler, scheduler.schedule())
    assert scheduler.prefix_hit_length(list(range(9))) == 8
    assert scheduler.prefix_hit_length(list(range(8))) == 4
    scheduler.add_request("b", list(range(8)), max_tokens=1)
    [new] = scheduler.schedule().debug_view()["scheduled_new_reqs"]
    assert new["num_computed_tokens"] == 4, "a request computes as much"


def test_the_queues_are_attributes():
    scheduler = make_scheduler(max_num_seqs=1)
    assert (scheduler.running, scheduler.waiting, scheduler.swapped) == ([], [], [])
    scheduler.add_request("a", [1] * 20, max_tokens=4)
    scheduler.add_request("b", [1] * 9, max_tokens=4)
    assert [request.request_id for request in scheduler.waiting] == ["a", "b"]
    update(scheduler, scheduler.schedule())
    [running], [waiting] = scheduler.running, scheduler.waiting
    assert (running.request_id, running.status, waiting.request_id, waiting.status) == ("a", "RUNNING", "b", "WAITING")
    assert (running.num_tokens, running.num_prompt_tokens, running.num_output_tokens) == (21, 20, 1)
    assert (running.num_computed_tokens, running.num_cached_tokens, running.num_blocks) == (20, 0, 2)
    assert repr(running) == "<Request 'a' RUNNING: 20 of 21 tokens computed, 2 blocks>"
    assert repr(scheduler) == (
        "<Scheduler after step 1: running 1 (a), waiting 1 (b), swapped 0; 61 of 63 blocks free>"
    )
    for name in "cdefg":
        scheduler.add_request(name, [1], max_tokens=1)
    assert "waiting 6 (b, c, d, e, …)" in repr(scheduler)


def test_swapped_requests_are_neither_running_nor_waiting():
    scheduler = make_scheduler(num_blocks=5, max_model_len=64, preemption_mode="swap", num_cpu_blocks=8)
    for name, token in (("a", 1), ("b", 2)):
        scheduler.add_request(name, [token] * 20, max_tokens=40)
    while not scheduler.swapped:
        update(scheduler, scheduler.schedule())
    assert [request.request_id for request in scheduler.running] == ["a"]
    assert scheduler.waiting == []
    [gone] = scheduler.swapped
    assert (gone.request_id, gone.status, gone.num_preemptions) == ("b", "SWAPPED", 1)
    assert scheduler.queues()["waiting"] == ["b"]
    assert "swapped 1 (b)" in repr(scheduler)


def test_a_steps_fields_are_attributes_while_it_is_in_flight():
    scheduler = make_scheduler(max_num_batched_tokens=64)
    scheduler.add_request("a", list(range(40)), max_tokens=4)
    update(scheduler, scheduler.schedule())
    scheduler.add_request("b", list(range(40)), max_tokens=4)
    output = scheduler.schedule()
    view = output.debug_view()
    assert view["num_common_prefix_blocks"] == [2], "b has found two blocks of a, and its third is its own"
    fields = [name for name in view if name not in ("step", "total_num_scheduled_tokens")]
    assert {name: getattr(output, name) for name in fields} == {name: view[name] for name in fields}
    assert set(fields) <= set(dir(output))
    assert output.num_scheduled_tokens == {"a": 1, "b": 8}
    assert [request["req_id"] for request in output.scheduled_new_reqs] == ["b"]
    assert (output.scheduled_encoder_inputs, output.free_encoder_mm_hashes) == ({}, [])
    assert repr(output) == (
        "SchedulerOutput(step=2, num_scheduled_tokens={'a': 1, 'b': 8}, total_num_scheduled_tokens=9, num_new_reqs=1, "
        "num_finished=0, num_preempted=0)"
    )
    assert not hasattr(output, "nothing")
    update(scheduler, output)
    assert repr(output) == "SchedulerOutput(step=2, num_reqs=2, total_num_scheduled_tokens=9, updated)"
    with pytest.raises(SchedulerStateError, match="step 2 has been updated"):
        _ = output.num_scheduled_tokens


def test_blocks_in_common_are_those_of_all_running_requests():
    scheduler = make_scheduler()
    scheduler.add_request("a", [1] * 40, max_tokens=4)
    output = scheduler.schedule()
    assert output.num_common_prefix_blocks == [3], "one request has all its blocks in common with itself"
    update(scheduler, output)
    scheduler.add_request("b", [2] * 40, max_tokens=4)
    assert scheduler.schedule().num_common_prefix_blocks == [0]


def test_a_step_of_many_requests_names_the_first():
    scheduler = make_scheduler()
    for index in range(9):
        scheduler.add_request(str(index), [index], max_tokens=1)
    assert "'7': 1, … 1 more}" in repr(scheduler.schedule())
