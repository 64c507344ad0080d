"""The debug face tells all: of the inbox, of blocks in large pools, of every output, and before the first step."""

import time

import numpy as np

from rustvllm import _core


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
