"""The trace of a request: (step, status, num_computed_tokens, num_tokens), when it is turned on."""

from hand_engine import HandEngine, make_scheduler, tokens


def trace(events, request_id):
    return [
        (event["step"], event["status"], event["num_computed_tokens"], event["num_tokens"])
        for event in events
        if event["request_id"] == request_id
    ]


def test_six_tokens_and_a_hundred_more():
    scheduler = make_scheduler(max_model_len=256)
    scheduler.set_trace(True)
    key = scheduler.add_request("a", [1, 2, 3, 4, 5, 6], max_tokens=100)
    scheduled = []
    while (output := scheduler.schedule()) is not None:
        scheduled.append(output.total_num_scheduled_tokens)
        scheduler.update_from_output(output, tokens(output))
    assert len(scheduled) == 100
    assert sum(scheduled) == 105
    assert scheduled == [6] + [1] * 99
    events, num_dropped = scheduler.take_events()
    assert num_dropped == 0
    expected = [(0, "WAITING", 0, 6)]
    # Step i computes tokens up to 5 + i, all that are known, and gives one more.
    expected += [(i, "RUNNING", 5 + i, 5 + i) for i in range(1, 101)]
    expected += [(100, "FINISHED_LENGTH_CAPPED", 105, 106)]
    assert trace(events, "a") == expected
    assert [event["num_scheduled_tokens"] for event in events] == [0, 6] + [1] * 99 + [0]
    times = [event["timestamp_ns"] for event in events]
    assert times == sorted(times)
    assert times[0] > 0
    records = scheduler.take_outputs()
    assert len(records) == 100
    assert {record["key"] for record in records} == {key}
    assert scheduler.take_events() == ([], 0)


def test_chunks_preemption_and_return():
    engine = HandEngine(
        num_blocks=7, block_size=4, max_model_len=24, max_num_batched_tokens=6, max_num_seqs=4,
        enable_prefix_caching=False,
    )  # fmt: skip
    engine.scheduler.set_trace(True)
    engine.add("a", range(1, 9), max_tokens=14)
    engine.add("b", range(2, 10), max_tokens=6)
    engine.finish()
    events, _ = engine.scheduler.take_events()
    assert trace(events, "a")[:4] == [
        (0, "WAITING", 0, 8),
        (1, "RUNNING", 6, 8),
        (2, "RUNNING", 8, 8),
        (3, "RUNNING", 9, 9),
    ]
    states = trace(events, "b")
    at = next(i for i, state in enumerate(states) if state[1] == "PREEMPTED")
    assert states[at][2] == 0
    assert states[at][3] == states[at - 1][3] + 1, "its output is kept"
    back = states[at + 1]
    assert back[1] == "RUNNING"
    assert back[2] == 6, "it is computed again in chunks"
    assert states[-1][1] == "FINISHED_LENGTH_CAPPED"


def test_swapped_requests_keep_what_they_computed():
    engine = HandEngine(
        num_blocks=7, block_size=4, max_model_len=24, enable_prefix_caching=False, preemption_mode="swap",
        num_cpu_blocks=8,
    )  # fmt: skip
    engine.scheduler.set_trace(True)
    engine.add("a", range(1, 9), max_tokens=14)
    engine.add("b", range(2, 10), max_tokens=9)
    engine.finish()
    states = trace(engine.scheduler.take_events()[0], "b")
    at = next(i for i, state in enumerate(states) if state[1] == "SWAPPED")
    assert states[at][2] == states[at - 1][2] > 0
    assert states[at + 1][1:3] == ("RUNNING", states[at][2] + 1)


def test_two_steps_in_flight_run_ahead_of_what_is_known():
    engine = HandEngine(max_steps_in_flight=2)
    engine.scheduler.set_trace(True)
    engine.add("a", [1, 2, 3], max_tokens=4)
    engine.finish()
    states = trace(engine.scheduler.take_events()[0], "a")
    assert states == [
        (0, "WAITING", 0, 3),
        (1, "RUNNING", 3, 3),
        (2, "RUNNING", 4, 3),
        (3, "RUNNING", 5, 4),
        (4, "RUNNING", 6, 5),
        (4, "FINISHED_LENGTH_CAPPED", 6, 7),
    ]


def test_nothing_is_recorded_unasked_and_nothing_kept_after_the_end():
    engine = HandEngine()
    engine.add("a", [1, 2, 3])
    engine.step()
    assert engine.scheduler.take_events() == ([], 0)
    engine.scheduler.set_trace(True)
    engine.step()
    engine.scheduler.set_trace(False)
    assert engine.scheduler.take_events() == ([], 0)
    engine.finish()


def test_the_newest_events_are_kept_and_the_others_counted():
    scheduler = make_scheduler(num_blocks=8192, max_num_seqs=1024, enable_prefix_caching=False)
    scheduler.set_trace(True)
    for i in range(1024):
        scheduler.add_request(str(i), [1], max_tokens=200)
    for _ in range(70):
        output = scheduler.schedule()
        scheduler.update_from_output(output, tokens(output))
        scheduler.take_outputs()
    events, num_dropped = scheduler.take_events()
    assert len(events) == 65_536
    assert num_dropped == 1024 + 70 * 1024 - 65_536
    assert events[-1]["step"] == 70


def test_events_know_the_blocks_and_on_demand_the_tokens():
    scheduler = make_scheduler(num_blocks=16, block_size=4, max_model_len=32, max_num_batched_tokens=6)
    scheduler.set_trace(True, with_tokens=True)
    scheduler.add_request("a", [1, 2, 3, 4, 5, 6, 7], max_tokens=3)
    tables, given = [], []
    while (output := scheduler.schedule()) is not None:
        tables.append(scheduler.request_state("a")["block_table"])
        sampled = tokens(output)
        given += sampled.ravel().tolist()
        scheduler.update_from_output(output, sampled)
    events, _ = scheduler.take_events()
    kinds = ["status", "scheduled", "scheduled", "token", "scheduled", "token", "scheduled", "token", "status"]
    assert [event["kind"] for event in events] == kinds
    assert [event["token_id"] for event in events if event["kind"] == "token"] == given
    assert [event["step"] for event in events if event["kind"] == "token"] == [2, 3, 4]
    table = []
    for event, expected in zip((each for each in events if each["kind"] == "scheduled"), tables, strict=True):
        table += event["new_block_ids"]
        assert table == expected
        assert event["num_blocks"] == len(expected)
    scheduler.add_request("b", [1, 2, 3, 4, 5, 6, 7], max_tokens=1)
    output = scheduler.schedule()
    [_, event] = scheduler.take_events()[0]
    assert event["num_cached_tokens"] == 4
    assert event["new_block_ids"] == scheduler.request_state("b")["block_table"], (
        "a new request's table is new as a whole"
    )
    scheduler.update_from_output(output, tokens(output))


def test_a_token_belongs_to_the_step_that_gave_it_though_another_is_planned():
    engine = HandEngine(max_steps_in_flight=2)
    engine.scheduler.set_trace(True, with_tokens=True)
    engine.add("a", [1, 2, 3], max_tokens=4)
    engine.finish()
    events, _ = engine.scheduler.take_events()
    assert [event["step"] for event in events if event["kind"] == "token"] == [1, 2, 3, 4]


def test_what_is_traced_is_what_runs_untraced():
    def run(**trace):
        engine = HandEngine(num_blocks=7, block_size=4, max_model_len=24, max_num_batched_tokens=6, max_num_seqs=4)
        if trace:
            engine.scheduler.set_trace(True, **trace)
        engine.add("a", range(1, 9), max_tokens=14)
        engine.add("b", range(2, 10), max_tokens=6)
        engine.finish()
        return engine.scheduler.stats()

    assert run() == run(with_tokens=False) == run(with_tokens=True)
