"""Preemption by swap, seen from Python: the copy lists, the states, and what happens when CPU memory is short."""

import numpy as np
from hand_engine import HandEngine, tokens


def make(**numbers):
    """Six usable blocks of four tokens: too few for two requests of six blocks."""
    small = {"num_blocks": 7, "block_size": 4, "max_model_len": 24, "enable_prefix_caching": False}
    small |= {"preemption_mode": "swap", "num_cpu_blocks": 8, "preemption_immunity_steps": 0}
    return HandEngine(**(small | numbers))


def run_until_swapped(engine):
    """Steps until "b" is swapped out; the step that names the copies."""
    for _ in range(20):
        output = engine.schedule()
        if engine.state("b")["status"] == "SWAPPED":
            return output
        engine.update()
    raise AssertionError("b was never swapped out")


def test_out_and_in_again():
    engine = make()
    engine.add("a", range(1, 9), max_tokens=14)
    engine.add("b", range(2, 10), max_tokens=9)
    table = []
    for _ in range(5):
        engine.step()
        table = engine.state("b")["block_table"]
    output = run_until_swapped(engine)
    view, arrays, state = output.debug_view(), engine.arrays(output), engine.state("b")
    assert (output.num_swap_out, output.num_swap_in, output.num_copies) == (3, 0, 0)
    pairs = arrays["blocks_to_swap_out"][:3].tolist()
    assert [block for block, _ in pairs] == table
    assert [cpu_block for _, cpu_block in pairs] == state["cpu_blocks"]
    assert view["blocks_to_swap_out"] == [tuple(pair) for pair in pairs]
    assert view["preempted_req_ids"] == ["b"]
    assert arrays["preempted_rows"][: output.num_preempted].tolist() == [1]
    assert (state["block_table"], state["row"], state["num_preemptions"]) == ([], None, 1)
    assert state["num_computed_tokens"] == 12, "what is in CPU memory need not be computed again"
    assert engine.scheduler.queues() == {"waiting": ["b"], "running": ["a"], "leaving": []}
    assert engine.scheduler.stats()["num_free_cpu_blocks"] == 5
    engine.update()
    while True:
        output = engine.schedule()
        if engine.state("b")["status"] == "RUNNING":
            break
        assert (output.num_swap_out, output.num_swap_in) == (0, 0)
        engine.update()
    view, arrays, back = output.debug_view(), engine.arrays(output), engine.state("b")
    assert output.num_swap_in == 3
    pairs_in = arrays["blocks_to_swap_in"][:3].tolist()
    assert pairs_in == [
        [cpu_block, block] for cpu_block, block in zip(state["cpu_blocks"], back["block_table"], strict=False)
    ]
    assert view["blocks_to_swap_in"] == [tuple(pair) for pair in pairs_in]
    assert view["resumed_req_ids"] == ["b"]
    assert view["num_scheduled_tokens"]["b"] == 1, "it goes on where it was"
    assert (back["cpu_blocks"], output.num_new_reqs) == ([], 1)
    engine.update()
    engine.finish()
    stats = engine.scheduler.stats()
    assert (stats["num_preemptions"], stats["num_swapped_out"], stats["num_swapped_in"]) == (1, 1, 1)


def test_what_is_still_cached_is_not_copied_back():
    engine = make(enable_prefix_caching=True, num_blocks=9, max_model_len=32)
    engine.add("a", range(1, 9), max_tokens=14)
    engine.add("b", range(2, 10), max_tokens=12)
    output = run_until_swapped(engine)
    num_out = output.num_swap_out
    engine.update()
    engine.scheduler.abort_requests(["a"])
    output = engine.schedule()
    assert engine.state("b")["status"] == "RUNNING"
    assert output.num_swap_in < num_out, "its full blocks were findable, and none was taken"
    engine.update()


def test_victims_with_steps_in_flight_leave_first_and_are_swapped_out_later():
    engine = make(max_steps_in_flight=2)
    engine.add("a", range(1, 9), max_tokens=14)
    engine.add("b", range(2, 10), max_tokens=9)
    for _ in range(30):
        while len(engine.in_flight) < 2 and (output := engine.schedule()) is not None:
            assert output.num_swap_out == 0
        if engine.scheduler.queues()["leaving"]:
            break
        engine.update()
    assert engine.scheduler.queues()["leaving"] == ["b"]
    state = engine.state("b")
    assert state["status"] == "SWAPPED"
    assert state["block_table"], "a step in flight still writes there"
    assert state["num_steps_in_flight"] > 0
    while engine.state("b")["num_steps_in_flight"]:
        engine.update()
    output = engine.schedule()
    assert engine.scheduler.queues()["leaving"] == []
    assert output.num_swap_out == len(state["block_table"])
    assert engine.arrays(output)["blocks_to_swap_out"][: output.num_swap_out, 0].tolist() == state["block_table"]
    engine.finish()


def test_without_room_in_cpu_memory_a_victim_is_computed_again():
    for num_cpu_blocks in (0, 2):
        engine = make(num_cpu_blocks=num_cpu_blocks)
        engine.add("a", range(1, 9), max_tokens=14)
        engine.add("b", range(2, 10), max_tokens=9)
        while True:
            engine.step()
            if engine.state("b")["status"] != "RUNNING":
                break
        assert engine.state("b")["status"] == "PREEMPTED"
        assert engine.state("b")["num_computed_tokens"] == 0
        engine.finish()
        stats = engine.scheduler.stats()
        assert stats["num_preemptions"] > 0
        assert stats["num_swapped_out"] == 0


def test_a_swapped_request_can_be_aborted():
    engine = make()
    engine.add("a", range(1, 9), max_tokens=14)
    key = engine.add("b", range(2, 10), max_tokens=9)
    run_until_swapped(engine)
    engine.update()
    engine.scheduler.abort_requests(["b"])
    engine.step()
    assert engine.scheduler.request_state("b") is None
    assert engine.scheduler.stats()["num_free_cpu_blocks"] == 8
    engine.finish(aborted=[key])


def test_a_failed_step_that_swapped_out_computes_its_victim_again():
    engine = make()
    engine.add("a", range(1, 9), max_tokens=14)
    key = engine.add("b", range(2, 10), max_tokens=9)
    output = run_until_swapped(engine)
    assert engine.scheduler.fail_step(output) == 1
    engine.in_flight.clear()
    engine.scheduler.check_invariants()
    assert engine.state("b")["status"] == "PREEMPTED"
    assert engine.state("b")["cpu_blocks"] == []
    engine.take_outputs()
    del engine._requests[next(iter(engine._requests))]
    engine.finish()
    assert engine.outputs[key][-1]["finish_reason"] == "length"


def test_reset_preempts_what_runs_and_what_is_swapped():
    engine = make()
    engine.add("a", range(1, 9), max_tokens=14)
    engine.add("b", range(2, 10), max_tokens=9)
    run_until_swapped(engine)
    engine.update()
    assert not engine.scheduler.reset_prefix_cache(), "blocks are in use"
    assert engine.scheduler.reset_prefix_cache(preempt_running=True)
    engine.scheduler.check_invariants()
    assert engine.scheduler.queues() == {"waiting": ["a", "b"], "running": [], "leaving": []}
    for name in "ab":
        state = engine.state(name)
        assert (state["status"], state["num_computed_tokens"], state["block_table"], state["cpu_blocks"]) == (
            "PREEMPTED", 0, [], [],
        )  # fmt: skip
    engine.finish()


def test_reset_with_steps_in_flight_loses_no_token():
    engine = HandEngine(max_steps_in_flight=2)
    for i in range(1, 4):
        engine.add(str(i), range(i, i + 40), max_tokens=8)
    engine.schedule()
    engine.schedule()
    assert engine.scheduler.reset_prefix_cache(preempt_running=True)
    engine.scheduler.check_invariants()
    assert engine.scheduler.prefix_hit_length(list(range(1, 41))) == 0
    engine.finish()
    assert engine.scheduler.stats()["num_preemptions"] == 3


def test_the_lists_are_empty_where_nothing_is_swapped():
    engine = HandEngine()
    engine.add("a", [1, 2, 3])
    output = engine.schedule()
    arrays = engine.arrays(output)
    assert arrays["blocks_to_swap_out"].shape == (1, 2), "an array has one element at least"
    assert arrays["blocks_to_copy"].shape == (128, 2)
    assert (output.num_swap_out, output.num_swap_in, output.num_copies) == (0, 0, 0)
    assert {output.debug_view()[f"blocks_to_{kind}"] == [] for kind in ("swap_out", "swap_in", "copy")} == {True}
    assert engine.scheduler.update_from_output(output, tokens(output)) == 0
    assert arrays["blocks_to_swap_in"].dtype == np.int32
