"""What an engine says of itself: the state of a toy engine, journeys, wrong questions, and rest without questions."""

import base64
import json

import pytest

from rustvllm import AsyncLLM, SamplingParams
from rustvllm.engine.core import EngineCore
from rustvllm.exceptions import EngineDeadError, QueryError, QueryTimeoutError
from rustvllm.observe.inspect import request_watch, step_summary
from rustvllm.observe.inspect.inspection import Inspection
from rustvllm.observe.inspect.queries import LocalQuery
from rustvllm.observe.trace.tracer import Tracer


class Asker:
    """An engine that is stepped by hand, and asked."""

    def __init__(self, config):
        self.core = EngineCore(config)
        self.inspection = Inspection(self.core)

    def ask(self, kind, **question):
        return json.loads(self.ask_raw(kind, json.dumps(question).encode()))

    def ask_raw(self, kind, payload):
        query = LocalQuery(kind, payload)
        self.inspection.answer(query)
        return query.outcome.result(0)

    def add(self, request_id, prompt, max_tokens=3):
        self.core.scheduler.add_request(request_id, prompt, max_tokens=max_tokens)

    def run(self, steps=100):
        for _ in range(steps):
            if not self.core.step():
                break


@pytest.fixture
def asker(toy_config, toy_executors):
    asker = Asker(toy_config())
    yield asker
    asker.core.shutdown()


def test_an_idle_engine_says_so(asker):
    state = asker.ask("state")
    assert state["stats"]["num_running"] == state["stats"]["num_waiting"] == 0
    assert state["requests"] == state["steps"]["steps"] == []
    assert state["limits"]["num_blocks"] == 65
    assert state["ranks"] == [], "one process holds the model"
    cells = base64.b64decode(state["blocks"]["cells"])
    assert cells == b"\4" + bytes(64)
    assert dict(zip(state["blocks"]["uses"], state["blocks"]["counts"], strict=True)) == {
        "free": 64, "used": 0, "cached": 0, "shared": 0, "null": 1,
    }  # fmt: skip


def test_requests_and_steps_are_told(asker):
    asker.ask("state")
    asker.add("one", list(range(1, 10)), max_tokens=5)
    asker.add("two", list(range(21, 26)), max_tokens=2)
    asker.run(2)
    state = asker.ask("state")
    (row,) = state["requests"]
    assert (row["request_id"], row["status"], row["num_prompt_tokens"]) == ("one", "RUNNING", 9)
    assert (row["num_computed_tokens"], row["num_tokens"], row["num_blocks"]) == (10, 11, 3)
    steps = state["steps"]
    assert [step[0] for step in steps["steps"]] == [1, 2]
    assert [step[2:4] for step in steps["steps"]] == [[14, 2], [2, 2]]
    totals = steps["totals"]
    assert (totals["num_steps"], totals["num_tokens"], totals["num_reqs"]) == (2, 16, 4)
    assert sum(totals["phase_ns"]) == totals["total_ns"] == sum(sum(step[4:]) for step in steps["steps"])
    assert len(steps["phases"]) == len(totals["phase_ns"]) == 6
    assert asker.ask("state", since_step=1)["steps"]["steps"] == steps["steps"][1:]
    assert asker.ask("state", max_steps=0)["steps"]["steps"] == []
    assert asker.ask("state", max_requests=0)["requests"] == []
    asker.run()
    assert asker.ask("state", since_step=2)["steps"]["totals"]["num_steps"] == 5


def test_nothing_is_observed_unless_asked_for(asker, monkeypatch):
    assert asker.core.watch.observers == ()
    asker.ask("state")
    asker.ask("state")
    assert len(asker.core.watch.observers) == 1
    seen = []
    asker.core.watch.add(seen.append)
    monkeypatch.setattr(step_summary, "PATIENCE_NS", -1)
    asker.add("one", [1, 2, 3])
    asker.run()
    assert len(seen) == 3, "another observer misses no step"
    assert asker.core.watch.observers == (seen.append,)
    assert asker.ask("state")["steps"]["totals"]["num_steps"] == 1, "one step after the last question"


def test_a_journey_is_told_from_the_queue_to_the_end(asker):
    asker.ask("journey", do="begin", request_id="one")
    asker.add("one-0", list(range(1, 8)), max_tokens=3)
    asker.add("other", [5, 6, 7])
    asker.run(1)
    first = asker.ask("journey", do="take", request_id="one")
    assert not first["is_finished"]
    asker.run()
    rest = asker.ask("journey", do="take", request_id="one", since=first["records"][-1]["index"] + 1)
    assert rest["is_finished"]
    records = first["records"] + rest["records"]
    assert [record["index"] for record in records] == list(range(len(records)))
    events = [record["event"] for record in records]
    step = ["planned", "scheduled", "ran", "sampled", "token", "updated"]
    assert events == ["waiting", *step * 3, "finished"]
    assert {record.get("request_id") for record in records} == {None, "one-0"}
    scheduled = [record for record in records if record["event"] == "scheduled"]
    counters = [(record["num_computed_tokens"], record["num_tokens"]) for record in scheduled]
    assert counters == [(7, 7), (8, 8), (9, 9)]
    assert asker.core.watch.tracer is not None
    assert asker.ask("journey", do="end", request_id="one") == {}
    assert asker.core.watch.tracer is None
    assert asker.core.watch.observers == ()
    asker.ask("journey", do="end", request_id="one")  # idempotent


def test_a_viewer_that_goes_ends_no_others_journey(asker):
    for _ in range(3):
        asker.ask("journey", do="begin", request_id="one")
    asker.ask("journey", do="end", request_id="one")
    assert asker.ask("journey", do="take", request_id="one")["records"] == []
    asker.ask("journey", do="end", request_id="one")
    assert asker.core.watch.tracer is not None
    asker.ask("journey", do="end", request_id="one")
    assert asker.core.watch.tracer is None


def test_a_watch_without_readers_ends(asker, monkeypatch):
    asker.ask("journey", do="begin", request_id="a")
    asker.ask("journey", do="begin", request_id="b")
    monkeypatch.setattr(request_watch, "PATIENCE_NS", -1)
    asker.add("other", [5, 6, 7])
    asker.run()
    assert asker.core.watch.tracer is None
    with pytest.raises(QueryError, match="request 'a' is not watched, or no longer"):
        asker.ask("journey", do="take", request_id="a")


def test_a_journey_goes_together_with_another_trace(asker):
    class Sink(list):
        write = list.append

        def flush(self):
            """Nothing is kept back."""

        close = flush

    seen = Sink()
    asker.core.watch.trace_to(Tracer([seen]))
    asker.ask("journey", do="begin", request_id="one")
    asker.add("one", [1, 2, 3])
    asker.run(1)
    assert len(asker.ask("journey", do="take", request_id="one")["records"]) == 7
    asker.ask("journey", do="end", request_id="one")
    asker.run()
    assert asker.core.watch.tracer is not None
    assert [record.event for record in seen].count("token") == 3, "the other trace has all of it"


def test_watches_are_bounded(asker):
    for number in range(request_watch.MAX_WATCHES):
        asker.ask("journey", do="begin", request_id=f"r{number}")
    with pytest.raises(QueryError, match="16 requests are already watched"):
        asker.ask("journey", do="begin", request_id="one more")
    asker.ask("journey", do="begin", request_id="r3")  # again


@pytest.mark.parametrize(
    ("kind", "payload", "words"),
    [
        ("states", b"{}", "there is no query 'states'; there are state, journey"),
        ("state", b"{", "is not JSON"),
        ("state", b"\xff", "is not JSON"),
        ("state", b"[1]", "must be an object, got"),
        ("state", b'{"max_requests": 257}', "max_requests must be a whole number from 0 to 256, got 257"),
        ("state", b'{"max_cells": "all"}', "max_cells must be a whole number from 0 to 65536, got 'all'"),
        ("state", b'{"since_step": true}', "since_step must be a whole number"),
        ("journey", b"{}", "request_id must be a text of 1 to 512 characters, got None"),
        ("journey", b'{"request_id": "r"}', "do must be begin, take or end, got None"),
        ("journey", b'{"request_id": "r", "do": "take"}', "request 'r' is not watched"),
        ("journey", b'{"request_id": "r", "do": "take", "since": -1}', "since must be a whole number"),
    ],
)
def test_wrong_questions_are_told_and_the_engine_goes_on(asker, kind, payload, words):
    with pytest.raises(QueryError) as caught:
        asker.ask_raw(kind, payload)
    assert words in str(caught.value)
    assert asker.ask("state")["requests"] == []


def test_a_question_that_breaks_is_an_error_and_not_the_engines_end(asker, monkeypatch, caplog):
    monkeypatch.setattr(asker.core.executor, "config", None)
    monkeypatch.setattr(asker.core, "num_blocks", object())  # no JSON
    with pytest.raises(QueryError, match="the query 'state' failed: TypeError: Object of type object"):
        asker.ask("state")
    assert "the query 'state' failed" in caplog.text
    asker.add("one", [1, 2, 3])
    asker.run()
    assert asker.core.handle.stats()["num_finished"] == 1


async def ask_until_refused(engine):
    for _ in range(100):
        await engine.query("state", seconds=0.2)


async def test_an_engine_in_a_thread_answers_idle_busy_and_late(toy_config, toy_executors):
    engine = AsyncLLM.from_engine_config(toy_config("api_server"))
    try:
        assert json.loads(await engine.query("state"))["stats"]["num_running"] == 0
        (executor,) = toy_executors
        stream = await engine.add_request("one", "ab", SamplingParams(max_tokens=40, ignore_eos=True))
        await anext(stream)
        assert json.loads(await engine.query("state", seconds=20))["stats"]["num_requests"] == 1
        executor.gate.clear()
        second = await engine.add_request("two", "cd", SamplingParams(max_tokens=40, ignore_eos=True))
        with pytest.raises(QueryTimeoutError, match="it is in a long step or has stalled"):
            await ask_until_refused(engine)
        executor.gate.set()
        assert [output async for output in second][-1].finished
        with pytest.raises(QueryError, match="there is no query"):
            await engine.query("nothing", seconds=20)
        with pytest.raises(IndexError, match="no engine of rank 1"):
            await engine.query("state", rank=1)
    finally:
        engine.shutdown()
    with pytest.raises(EngineDeadError):
        await engine.query("state")
