"""Steps that overlap: the same tokens as one at a time, through aborts, stops and preemptions; failures; the trace.

A simulated step that never says it is done makes the engine plan the next one behind it, however slow this machine is.
"""

import asyncio
import itertools
import json
import random
import time
from dataclasses import dataclass

import pytest

from coming_and_going import outputs_of
from rustvllm import AsyncLLM, LLMEngine, SamplingParams
from rustvllm.config.engine_args import AsyncEngineArgs, EngineArgs
from rustvllm.engine import start as engine_start
from rustvllm.exceptions import ConfigError, EngineDeadError, RequestFailedError
from rustvllm.executor.sim import SimExecutor, SimStepOutput
from rustvllm.sampling_params import RequestOutputKind

FINAL = RequestOutputKind.FINAL_ONLY


class ScriptedExecutor(SimExecutor):
    """A simulation whose launches and waits are written down, and fail where the test says so.

    Attributes:
        events: ``launch n`` and ``wait n``, in order, n counted from 1.
        failures: (``execute``, ``sample`` or ``wait``, n) → what is raised there.
    """

    def __init__(self, config, sim):
        super().__init__(config, sim)
        self.events = []
        self.failures = {}
        self.num_launched = 0

    def execute_model(self, scheduler_output):
        self.num_launched += 1
        self.events.append(f"launch {self.num_launched}")
        self._raise_for("execute")
        super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output=None):
        step = super().sample_tokens(grammar_output)
        self._raise_for("sample")
        return ScriptedStep(self, self.num_launched, step)

    def _raise_for(self, what):
        if (error := self.failures.get((what, self.num_launched))) is not None:
            raise error


@dataclass
class ScriptedStep:
    executor: ScriptedExecutor
    number: int
    step: SimStepOutput

    def is_done(self):
        return False

    def get_output(self):
        self.executor.events.append(f"wait {self.number}")
        if (error := self.executor.failures.get(("wait", self.number))) is not None:
            raise error
        return self.step.get_output()


@pytest.fixture
def make(monkeypatch):
    """Makes engines over scripted executors; the last one made is ``make.executor``."""
    engines = []

    def make_executor(config, _node_secret=None):
        make.executor = ScriptedExecutor(config, config.sim)
        return make.executor

    monkeypatch.setattr(engine_start, "make_executor", make_executor)

    def make(*, asynchronous=False, **arguments):
        given = {"executor": "sim", "skip_tokenizer_init": False, "num_gpu_blocks_override": 200} | arguments
        if asynchronous:
            engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**given))
        else:
            engine = LLMEngine.from_engine_args(EngineArgs(**given))
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.shutdown()


def finish(engine):
    outputs = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                outputs[output.request_id] = output
    return outputs


def test_the_default_is_to_overlap_where_the_device_runs_by_itself():
    def scheduler(**arguments):
        return EngineArgs(**arguments).create_engine_config().scheduler

    assert scheduler(executor="sim").async_scheduling
    assert not scheduler(executor="sim", async_scheduling=False).async_scheduling
    assert not scheduler(device="cpu").async_scheduling
    assert scheduler(device="cpu", async_scheduling=True).async_scheduling
    with pytest.raises(ConfigError, match="async_scheduling must be true, false or None, got 'yes'"):
        scheduler(async_scheduling="yes")


@pytest.mark.parametrize(
    ("overlap", "events"),
    [
        (False, "launch 1, wait 1, launch 2, wait 2, launch 3, wait 3, launch 4, wait 4"),
        (True, "launch 1, launch 2, wait 1, launch 3, wait 2, launch 4, wait 3, wait 4"),
    ],
)
def test_the_next_step_is_launched_before_the_last_one_is_awaited(make, overlap, events):
    engine = make(async_scheduling=overlap)
    engine.add_request("r", [5, 6, 7], SamplingParams(temperature=0, max_tokens=4))
    assert len(finish(engine)["r"].outputs[0].token_ids) == 4
    assert ", ".join(make.executor.events) == events


def test_a_step_that_is_over_is_taken_in_at_once(make, monkeypatch):
    engine = make()
    monkeypatch.setattr(ScriptedStep, "is_done", lambda _: True)
    engine.add_request("r", [5, 6, 7], SamplingParams(temperature=0, max_tokens=2))
    finish(engine)
    assert make.executor.events == ["launch 1", "wait 1", "launch 2", "wait 2"]


def workload(seed):
    """Requests of every kind: id, prompt, parameters, the step in which it comes and the one in which it is aborted."""
    rng = random.Random(seed)
    for index in range(24):
        prompt = [rng.randrange(5, 400) for _ in range(rng.choice([1, 3, 20, 40]))]
        if index % 4 == 0:
            prompt = [7, 8, 9] * 8 + prompt  # shared
        temperature = rng.choice([0.0, 1.0])
        params = SamplingParams(
            temperature=temperature,
            seed=rng.randrange(1000),
            n=rng.choice([1, 1, 3]) if temperature else 1,
            max_tokens=rng.randrange(1, 40),
            min_tokens=rng.choice([0, 0, 1]),
            stop=rng.choice([None, None, ["a"], ["er", "on"]]),
            ignore_eos=rng.random() < 0.5,
        )
        comes = rng.randrange(30)
        yield f"r{index}", prompt, params, comes, comes + rng.randrange(8) if index % 5 == 0 else None


def run(engine, requests):
    """Every request's answers: token ids, text and how each ended."""
    outputs = {output.request_id: output for output in outputs_of(engine, requests, most_steps=5000) if output.finished}
    stats = engine.engine_core.core.scheduler.stats()
    assert (stats["num_running"], stats["num_waiting"], stats["kv_cache_usage"]) == (0, 0, 0)
    answers = {
        request_id: [(list(s.token_ids), s.text, s.finish_reason, s.stop_reason) for s in output.outputs]
        for request_id, output in outputs.items()
    }
    return answers, stats


CROWDED = {"num_gpu_blocks_override": 9, "max_model_len": 96, "max_num_seqs": 8, "max_num_batched_tokens": 32}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "arguments",
    [{"sim_eos_after": 9}, CROWDED, CROWDED | {"preemption_mode": "swap", "swap_space": 0.01, "sim_eos_after": 14}],
    ids=["roomy", "crowded", "swapping"],
)
def test_the_same_tokens_with_and_without(make, arguments, seed):
    results = []
    for overlap in (False, True):
        answers, stats = run(make(async_scheduling=overlap, **arguments), workload(seed))
        results.append(answers)
        assert (stats["num_preemptions"] > 0) == ("num_gpu_blocks_override" in arguments)
    alone, overlapped = results
    assert alone.keys() == overlapped.keys() == {f"r{index}" for index in range(24)}
    for request_id, samples in alone.items():
        for one, other in zip(samples, overlapped[request_id], strict=True):
            if "abort" in (one[2], other[2]):  # it came in another step, but what there was is the same
                shorter, longer = sorted((one[0], other[0]), key=len)
                assert longer[: len(shorter)] == shorter
            else:
                assert one == other, request_id
    assert {sample[2] for samples in overlapped.values() for sample in samples} >= {"stop", "length"}


BOOM = RuntimeError("boom")


@pytest.mark.parametrize("where", ["execute", "sample", "wait"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_failed_step_ends_its_requests_and_no_others(make, where, number):
    engine = make()
    reported = []
    engine.engine_core.core.on_step_error = reported.append
    make.executor.failures = {(where, number): BOOM}
    engine.add_request("first", [5, 6, 7], SamplingParams(temperature=0, max_tokens=20))
    outputs = finish(engine)
    assert outputs["first"].outputs[0].finish_reason == "error"
    assert outputs["first"].error.endswith("RuntimeError: boom")
    assert reported == ["RuntimeError: boom"]
    # A step that was complete before is delivered.
    delivered = len(outputs["first"].outputs[0].token_ids)
    assert delivered == number - 1
    make.executor.failures = {}
    engine.add_request("second", [5, 6, 7], SamplingParams(temperature=0, max_tokens=5))
    assert len(finish(engine)["second"].outputs[0].token_ids) == 5
    stats = engine.engine_core.core.scheduler.stats()
    assert stats["kv_cache_usage"] == 0
    engine.engine_core.core.scheduler.check_invariants()


def test_a_step_planned_behind_a_failed_one_ends_with_it_and_later_ones_live(make):
    engine = make(max_num_seqs=4)
    make.executor.failures = {("wait", 2): BOOM, ("sample", 3): ValueError("late")}
    for name in ("a", "b"):
        engine.add_request(name, [5, 6, 7], SamplingParams(temperature=0, max_tokens=20))
    outputs = finish(engine)
    assert {name: output.outputs[0].finish_reason for name, output in outputs.items()} == {"a": "error", "b": "error"}
    assert outputs["a"].error.endswith("RuntimeError: boom"), "the step that failed first is the reason"
    assert make.executor.events == ["launch 1", "launch 2", "wait 1", "launch 3", "wait 2"]
    engine.add_request("c", [5, 6], SamplingParams(temperature=0, max_tokens=3))
    assert finish(engine)["c"].outputs[0].finish_reason == "length"


def test_nothing_is_planned_behind_a_failed_launch(make):
    engine = make()
    make.executor.failures = {("execute", 2): BOOM}
    engine.add_request("a", [5, 6, 7], SamplingParams(temperature=0, max_tokens=20))
    engine.step()
    engine.step()  # launches the second, which fails; takes in the first and then fails the second
    assert make.executor.events == ["launch 1", "launch 2", "wait 1"]
    engine.add_request("b", [8, 9], SamplingParams(temperature=0, max_tokens=3))
    outputs = finish(engine)
    assert outputs["b"].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("failures", [{("execute", 3): KeyboardInterrupt()}, {("wait", 2): KeyboardInterrupt()},
                                      {("wait", 2): BOOM, ("execute", 3): KeyboardInterrupt()}])  # fmt: skip
def test_ctrl_c_is_raised_and_leaves_a_working_engine(make, failures):
    engine = make()
    make.executor.failures = failures
    engine.add_request("a", [5, 6, 7], SamplingParams(temperature=0, max_tokens=20))
    with pytest.raises(KeyboardInterrupt):
        finish(engine)
    make.executor.failures = {}
    engine.add_request("b", [5, 6], SamplingParams(temperature=0, max_tokens=3))
    assert finish(engine)["b"].outputs[0].finish_reason == "length"


def test_three_failed_steps_in_a_row_end_the_engine(make):
    engine = make()
    make.executor.failures = {("wait", number): BOOM for number in range(1, 20)}
    for name in "abc":
        engine.add_request(name, [5, 6, 7], SamplingParams(temperature=0, max_tokens=20))
        if name == "c":
            with pytest.raises(EngineDeadError, match="3 steps in a row failed, the last with RuntimeError: boom"):
                finish(engine)
        else:
            finish(engine)


def test_streams_through_an_engine_thread(make):
    async def answers(engine):
        async def one(index):
            params = SamplingParams(temperature=1.0, seed=index, max_tokens=20, output_kind=FINAL)
            [output] = [output async for output in engine.generate([5, 6, 7 + index], params, f"r{index}")]
            return list(output.outputs[0].token_ids)

        return await asyncio.gather(*(one(index) for index in range(12)))

    async def failing(engine):
        with pytest.raises(RequestFailedError, match="RuntimeError: boom"):
            async for _ in engine.generate([5, 6, 7], SamplingParams(max_tokens=20), "failing"):
                pass
        return await answers(engine)

    results = []
    for overlap in (False, True):
        engine = make(asynchronous=True, async_scheduling=overlap)
        results.append(asyncio.run(answers(engine)))
        make.executor.failures = {("wait", make.executor.num_launched + 2): BOOM}
        results.append(asyncio.run(failing(engine)))
        assert engine.stats()["kv_cache_usage"] == 0
    assert results == [results[0]] * 4


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_trace(make, tmp_path, overlap):
    path = tmp_path / "steps.jsonl"
    begin = time.monotonic_ns()
    engine = make(async_scheduling=overlap, step_trace_file=str(path), sim_step_time=2.0)
    engine.add_request("r", [5, 6, 7], SamplingParams(temperature=0, max_tokens=5))
    finish(engine)
    engine.shutdown()
    end = time.monotonic_ns()
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(step["step"], step["num_tokens"], step["num_reqs"]) for step in steps] == [
        (number, 3 if number == 1 else 1, 1) for number in range(1, 6)
    ]
    for step in steps:
        times = [step[f"{name}_ns"] for name in ("schedule", "launch", "done", "update")]
        assert begin <= times[0] <= times[1] <= times[2] <= times[3] <= end
        assert times[2] - times[0] >= 1_900_000
    for step, following in itertools.pairwise(steps):
        assert (following["launch_ns"] < step["done_ns"]) == overlap


def test_the_trace_is_written_when_the_engine_is_idle(make, tmp_path):
    path = tmp_path / "steps.jsonl"
    engine = make(asynchronous=True, step_trace_file=str(path))

    async def scene():
        async for _ in engine.generate([5, 6, 7], SamplingParams(max_tokens=5, ignore_eos=True), "r"):
            pass
        deadline = time.monotonic() + 20
        while len(path.read_text().splitlines()) < 5:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)

    asyncio.run(scene())


def test_a_trace_that_cannot_be_written_is_refused(make, tmp_path):
    with pytest.raises(ConfigError, match=r"step_trace_file '.*nowhere/steps\.jsonl' cannot be written: No such file"):
        make(step_trace_file=str(tmp_path / "nowhere" / "steps.jsonl"))
    with pytest.raises(ConfigError, match="step_trace_file must be a non-empty string, got ''"):
        make(step_trace_file="")
