"""Who waits for what: a grammar, room, its turn; and who may pass."""

import pytest
from hand_engine import HandEngine, make_scheduler, tokens


def test_a_request_waits_for_its_grammar_and_holds_no_other_up():
    engine = HandEngine()
    key = engine.add("g", [1, 2, 3], waits_for_grammar=True)
    engine.add("a", [2, 2, 3])
    output = engine.step()
    assert output.num_structured_output_reqs == 0
    assert engine.scheduler.queues() == {"waiting": ["g"], "running": ["a"], "leaving": []}
    assert engine.state("g")["status"] == "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"
    engine.scheduler.handle.grammar_ready(key)
    output = engine.schedule()
    assert output.num_structured_output_reqs == 1
    assert output.debug_view()["has_structured_output_requests"]
    assert engine.state("g")["status"] == "RUNNING"
    engine.update()
    engine.finish()


def test_alone_it_waits_without_a_step():
    engine = HandEngine()
    key = engine.add("g", [1, 2, 3], waits_for_grammar=True)
    assert engine.schedule() is None
    assert engine.scheduler.has_unfinished_requests()
    engine.scheduler.handle.grammar_ready(10**6)  # of no request: ignored
    assert engine.schedule() is None
    engine.scheduler.handle.grammar_ready(key)
    engine.scheduler.handle.grammar_ready(key)
    engine.finish()


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone():
    scheduler = make_scheduler()
    key = scheduler.add_request("g", [1, 2, 3], max_tokens=4, waits_for_grammar=True)
    scheduler.add_request("a", [1, 2, 3], max_tokens=4)
    scheduler.handle.grammar_failed(key)
    output = scheduler.schedule()
    scheduler.check_invariants()
    (record,) = scheduler.take_outputs()
    assert (record["key"], record["finish_reason"]) == (key, "error")
    assert "could not be compiled" in record["error"]
    assert scheduler.update_from_output(output, tokens(output)) == 0


def test_a_grammar_without_room_ends_its_request_alone():
    scheduler = make_scheduler()
    waiting = scheduler.add_request("w", [1, 2, 3], max_tokens=4, waits_for_grammar=True)
    running = scheduler.add_request("r", [1, 2, 3], max_tokens=4)
    scheduler.handle.grammars_full(waiting)
    output = scheduler.schedule()
    (record,) = scheduler.take_outputs()
    assert (record["key"], record["finish_reason"]) == (waiting, "error")
    assert "try again later" in record["error"]
    sampled = tokens(output)
    sampled[0] = -6
    assert scheduler.update_from_output(output, sampled) == 1
    scheduler.check_invariants()
    (record,) = scheduler.take_outputs()
    assert (record["key"], record["finish_reason"]) == (running, "error")
    assert "try again later" in record["error"]


def test_a_token_that_the_grammar_refuses_ends_its_request_alone():
    scheduler = make_scheduler()
    key = scheduler.add_request("g", [1, 2, 3], max_tokens=4, waits_for_grammar=True)
    other = scheduler.add_request("a", [1, 2, 3], max_tokens=4)
    scheduler.handle.grammar_ready(key)
    output = scheduler.schedule()
    sampled = tokens(output)
    sampled[0] = -2
    assert scheduler.update_from_output(output, sampled) == 1
    scheduler.check_invariants()
    refused, given = scheduler.take_outputs()
    assert (refused["key"], refused["finish_reason"], refused["new_token_id"]) == (key, "error", None)
    assert "grammar" in refused["error"]
    assert (given["key"], given["new_token_id"]) == (other, 7)


def crowded(**numbers):
    """Ten usable blocks, five of them in use; "big" needs eight, then come six that need one each."""
    engine = HandEngine(num_blocks=11, block_size=4, max_model_len=40, enable_prefix_caching=False, **numbers)
    engine.add("first", range(1, 18), max_tokens=20)
    engine.step()
    engine.add("big", range(2, 33), max_tokens=2)
    for i in range(6):
        engine.add(str(i), [10 + i], max_tokens=2)
    return engine


def test_no_request_passes_unless_it_is_allowed():
    engine = crowded()
    engine.step()
    assert engine.scheduler.queues()["waiting"] == ["big", *"012345"]
    engine.finish()
    assert engine.scheduler.stats()["num_look_past"] == 0


def test_a_bounded_number_may_pass_in_a_step():
    engine = crowded(max_look_past=2)
    engine.step()
    assert engine.scheduler.queues() == {"running": ["first", "0", "1"], "waiting": ["big", *"2345"], "leaving": []}
    engine.step()
    assert engine.scheduler.queues()["waiting"] == ["big", *"45"]
    assert engine.scheduler.stats()["num_look_past"] == 4
    engine.finish()


@pytest.mark.parametrize(("max_times_passed", "passed"), [(0, []), (1, ["0"]), (3, ["0", "1", "2"])])
def test_one_that_was_passed_often_enough_is_passed_no_more(max_times_passed, passed):
    engine = crowded(max_look_past=4, max_times_passed=max_times_passed)
    ran = []
    while "big" in engine.scheduler.queues()["waiting"] or not ran:
        output = engine.schedule()
        ran += [request["req_id"] for request in output.debug_view()["scheduled_new_reqs"]]
        engine.update()
    assert ran[: len(passed) + 1] == [*passed, "big"]
    engine.finish()


def test_the_watermark_keeps_blocks_free_for_those_that_run():
    for watermark, admitted in ((0.0, True), (0.5, False)):
        engine = HandEngine(num_blocks=11, block_size=4, max_model_len=40, watermark=watermark)
        engine.add("a", range(1, 18), max_tokens=4)
        engine.step()
        engine.add("b", range(2, 10), max_tokens=4)
        engine.step()
        assert (engine.state("b")["status"] == "RUNNING") == admitted
        engine.finish()


def test_priority_comes_before_arrival():
    engine = HandEngine(max_num_seqs=1, scheduling_policy="priority")
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -1)):
        engine.add(name, [5, 6], priority=priority)
    assert engine.schedule().debug_view()["num_scheduled_tokens"] == {"d": 2}
    assert engine.scheduler.queues()["waiting"] == ["b", "a", "c"]
    engine.update()
    engine.finish()


def test_a_long_prompt_is_cut_only_in_company():
    scheduler = make_scheduler(
        num_blocks=512, max_model_len=4096, max_num_batched_tokens=4096, long_prefill_token_threshold=512
    )
    scheduler.add_request("a", list(range(1100)), max_tokens=2)
    scheduler.add_request("b", [1, 2, 3], max_tokens=2)
    output = scheduler.schedule()
    scheduler.update_from_output(output, tokens(output))
    scheduler.add_request("c", list(range(2000, 2064)), max_tokens=2)
    output = scheduler.schedule()
    assert output.total_num_scheduled_tokens == 577
    assert scheduler.step_buffers[output.buffer_index]["num_scheduled_tokens"][:3].tolist() == [512, 1, 64]


def test_take_outputs_says_what_became_of_each_request():
    scheduler = make_scheduler()
    a = scheduler.add_request("a", list(range(40)), max_tokens=2)
    b = scheduler.add_request("b", [1, 2], max_tokens=9, stop_token_ids=[7])
    again = scheduler.add_request("a", [1], max_tokens=1)
    nothing = scheduler.add_request("c", list(range(40)), max_tokens=0)
    output = scheduler.schedule()
    scheduler.update_from_output(output, tokens(output))
    records = {record["key"]: record for record in scheduler.take_outputs()}
    empty = {"new_token_id": 7, "finish_reason": None, "stop_reason": None, "num_cached_tokens": 0, "error": None}
    assert records[a] == empty | {"key": a, "request_id": "a"}
    assert records[b] == empty | {"key": b, "request_id": "b", "finish_reason": "stop", "stop_reason": 7}
    assert records[again]["finish_reason"] == "error"
    assert "still running" in records[again]["error"]
    assert (records[nothing]["new_token_id"], records[nothing]["finish_reason"]) == (None, "length")
    assert records[nothing]["num_cached_tokens"] == 32, "a and c have equal prompts and share blocks"
    assert scheduler.take_outputs() == []
