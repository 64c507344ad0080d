"""``AsyncLLM`` over the real core: streams, merging, cancellation, death and shutdown. The toy model counts up."""

import asyncio
import gc
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest

from async_streams import GREEDY, LONG, collect, is_idle, until
from rustvllm import AsyncLLM, BeamSearchParams, SamplingParams
from rustvllm.engine.request.state import RequestState
from rustvllm.exceptions import (
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    QueueTimeoutError,
    RequestFailedError,
)
from rustvllm.sampling_params import RequestOutputKind
from rustvllm.server.flags.settings import ServerSettings
from rustvllm.server.stream.generation import Generation


@pytest.fixture
def make(make_async):
    return make_async


async def test_one_request(make):
    outputs = await collect(make(), "ab", GREEDY, "r")
    assert outputs[-1].outputs[0].text == "cdef"
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


async def test_deltas_add_up(make):
    outputs = await collect(make(), "a", LONG, "r")
    ids = [token_id for output in outputs for token_id in output.outputs[0].token_ids]
    text = "".join(output.outputs[0].text for output in outputs)
    assert ids == list(range(98, 158))
    assert text == bytes(ids).decode("utf-8", "replace")


async def test_many_at_once(make):
    engine = make()
    params = GREEDY.clone(output_kind=RequestOutputKind.FINAL_ONLY)
    every = await asyncio.gather(*(collect(engine, chr(97 + i % 20), params, f"r{i}") for i in range(100)))
    for index, outputs in enumerate(every):
        assert [output.outputs[0].text for output in outputs] == ["".join(chr(98 + index % 20 + i) for i in range(4))]
    await until(lambda: is_idle(engine))


async def test_a_slow_reader_gets_merged_deltas(make, toy_executors):
    engine = make()
    stream = await engine.add_request("r", "a", LONG)
    await until(lambda: len(toy_executors[0].steps) >= 60)
    await asyncio.sleep(0.05)
    outputs = [output async for output in stream]
    assert len(outputs) == 1
    assert len(outputs[0].outputs[0].token_ids) == 60


async def test_a_blocked_event_loop_loses_no_output(make, toy_executors):
    """More outputs than the egress holds, without a reader."""
    engine = make(max_num_seqs=8)
    streams = [await engine.add_request(str(index), "a", LONG) for index in range(64)]
    while len(toy_executors[0].steps) < 60 * 8:
        time.sleep(0.01)  # noqa: ASYNC251 -- the loop is to be blocked
    time.sleep(0.1)  # noqa: ASYNC251
    async with asyncio.timeout(10):
        for stream in streams:
            assert sum([len(output.outputs[0].token_ids) async for output in stream]) == 60
    await until(lambda: is_idle(engine))


@pytest.mark.slow
async def test_no_wake_up_is_lost(make):
    """Readers and engine race for the notification; a lost one would leave the last outputs unread for ever."""
    engine = make(max_num_seqs=64, num_gpu_blocks_override=1200)
    async with asyncio.timeout(90):
        for round_ in range(10):
            every = await asyncio.gather(*(collect(engine, "a", LONG, f"{round_}-{i}") for i in range(640)))
            assert all(sum(len(output.outputs[0].token_ids) for output in outputs) == 60 for outputs in every)


async def test_wrong_requests_are_raised_before_anything_and_harm_no_other(make):
    engine = make()
    stream = await engine.add_request("good", "a", LONG)
    for prompt, params, message in [("", GREEDY, "empty"), ([999], GREEDY, "999"), ("a" * 64, GREEDY, "64 tokens")]:
        with pytest.raises(InvalidRequestError, match=message):
            await engine.add_request("bad", prompt, params)
        with pytest.raises(InvalidRequestError, match=message):
            await collect(engine, prompt, params, "bad")
    with pytest.raises(InvalidRequestError, match="is still running"):
        await engine.add_request("good", "a", GREEDY)
    assert sum([len(output.outputs[0].token_ids) async for output in stream]) == 60


async def test_a_long_prompt_is_tokenised_off_the_loop(make, monkeypatch):
    engine = make()
    encoded = []
    off_loop = engine.tokenizer.encode_off_loop
    monkeypatch.setattr(
        engine.tokenizer, "encode_off_loop", lambda text, special: encoded.append(len(text)) or off_loop(text, special)
    )
    params = GREEDY.clone(truncate_prompt_tokens=4)
    outputs = await collect(engine, "a" * 100_000, params, "r")
    assert outputs[-1].prompt_token_ids == [97] * 4
    outputs = await collect(engine, {"prompt": "a" * 5000, "add_special_tokens": False}, params, "r")
    assert outputs[-1].prompt_token_ids == [97] * 4
    await collect(engine, "a", GREEDY, "short")
    assert encoded == [100_000, 5000]


async def test_what_is_wrong_with_a_long_prompt_is_found_before_it_is_tokenised(make, monkeypatch):
    engine = make()
    monkeypatch.setattr(engine.tokenizer, "encode_off_loop", None)
    for prompt, params, priority, message in [
        ("a" * 5000, "greedy", 0, "SamplingParams"),
        ("a" * 5000, GREEDY, 7, "priority"),
        ({"prompt": "a" * 5000, "salt": "x"}, GREEDY, 0, "may have the keys"),
        ({"prompt": "a" * 5000, "add_special_tokens": 1}, GREEDY, 0, "True or False"),
    ]:
        with pytest.raises(InvalidRequestError, match=message):
            await engine.add_request("r", prompt, params, priority=priority)


async def test_leaving_while_a_prompt_is_tokenised(make):
    engine = make()
    cut = GREEDY.clone(truncate_prompt_tokens=9)  # else it would be refused for its length alone
    tasks = [asyncio.create_task(engine.add_request(f"r{i}", "ab " * 200_000, cut)) for i in range(4)]
    await asyncio.sleep(0)
    pool = engine.tokenizer._pool
    assert pool is not None
    assert pool.num_waiting_bytes == 4 * 600_000
    for task in tasks:
        task.cancel()
    assert all(
        isinstance(error, asyncio.CancelledError) for error in await asyncio.gather(*tasks, return_exceptions=True)
    )
    await until(lambda: pool.num_waiting_bytes == 0)
    assert len(engine._requests) == 0
    assert (await collect(engine, "a", GREEDY, "r0"))[-1].outputs[0].text == "bcde"


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(make):
    engine = make()
    with pytest.raises(InvalidRequestError, match=r"at least \d+ input tokens \(600000 characters\): at most 63 fit"):
        await engine.add_request("r", "ab " * 200_000, GREEDY)
    assert engine.tokenizer._pool is None
    assert len(engine._requests) == 0


async def test_a_long_prompt_is_read_and_its_parameters_are_checked_once(make, monkeypatch):
    engine = make()
    calls = []
    for name in ("_check_params", "_read", "_encoded"):
        whole = getattr(engine.input_processor, name)
        monkeypatch.setattr(
            engine.input_processor, name, lambda *args, whole=whole, name=name: (calls.append(name), whole(*args))[1]
        )
    params = GREEDY.clone(truncate_prompt_tokens=9, bad_words=["x" * 100] * 6)
    assert (await collect(engine, "ab " * 2000, params, "r"))[-1].finished
    assert sorted(calls) == ["_check_params", "_encoded", "_read"]


async def test_full_queue(make, toy_executors):
    engine = make(max_num_seqs=1, max_num_queued_reqs=2)
    toy_executors[0].gate.clear()
    streams = [await engine.add_request("running", "a", GREEDY)]
    await until(lambda: toy_executors[0].steps)
    streams += [await engine.add_request(f"waiting{i}", "a", GREEDY) for i in range(2)]
    with pytest.raises(QueueFullError, match="2 requests are waiting") as caught:
        await engine.add_request("too many", "a", GREEDY)
    assert 1 <= caught.value.retry_after <= 60
    toy_executors[0].gate.set()
    for stream in streams:
        assert [output async for output in stream][-1].outputs[0].text == "bcde"


@pytest.mark.parametrize(
    ("params", "name"),
    [
        (SamplingParams(n=3), "n"),
        (SamplingParams(best_of=3), "best_of"),
        (BeamSearchParams(beam_width=3, max_tokens=2), "n"),
    ],
)
async def test_what_the_queue_can_never_take_is_the_requests_fault(make, params, name):
    engine = make(max_num_queued_reqs=2)
    says = rf"{name} is 3, but at most 2 requests may wait \(max_num_queued_reqs\): lower {name}"
    with pytest.raises(InvalidRequestError, match=says) as caught:
        await engine.add_request("r", "a", params)
    assert caught.value.param == name
    assert engine.stats()["num_requests"] == 0


async def test_a_request_id_with_half_a_character_is_refused(make):
    engine = make()
    with pytest.raises(InvalidRequestError, match=r"request_id must be valid Unicode, got '\\ud800'"):
        await engine.add_request("\ud800", "a", GREEDY)


async def test_who_waits_too_long(make, toy_executors):
    engine = make(max_num_seqs=1, queue_timeout=0.05)
    toy_executors[0].gate.clear()
    running = await engine.add_request("running", "a", GREEDY)
    await until(lambda: toy_executors[0].steps)
    waiting = await engine.add_request("waiting", "a", GREEDY)
    await asyncio.sleep(0.06)
    # The engine is in a step: it finds out behind it, while the running request has more of them to come.
    toy_executors[0].gate.set()
    with pytest.raises(QueueTimeoutError, match=r"queue_timeout = 0\.05 s and did not start") as caught:
        await anext(waiting)
    assert 1 <= caught.value.retry_after <= 60
    assert [output async for output in running][-1].outputs[0].text == "bcde"
    assert engine.stats()["num_queue_timeouts"] == 1


@pytest.mark.parametrize("how", ["cancel", "aclose", "close"])
async def test_leaving_early_frees_everything_within_a_step(make, toy_executors, how):
    engine = make()
    toy_executors[0].step_seconds = 0.01
    if how == "cancel":
        task = asyncio.create_task(collect(engine, "a", LONG, "r"))
        await until(lambda: len(toy_executors[0].steps) >= 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    elif how == "aclose":
        generator = engine.generate("a", LONG, "r")
        await anext(generator)
        await generator.aclose()
    else:
        stream = await engine.add_request("r", "a", LONG)
        await anext(stream)
        stream.close()
        stream.close()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    steps = len(toy_executors[0].steps)
    await until(lambda: is_idle(engine))
    assert len(toy_executors[0].steps) <= steps + 2
    assert [output.outputs[0].text for output in await collect(engine, "a", GREEDY, "r")][-1] == "bcde"


async def test_abort_ends_the_stream(make, toy_executors):
    engine = make()
    toy_executors[0].step_seconds = 0.01
    outputs = []
    async for output in engine.generate("a", LONG.clone(n=2, temperature=1), "r"):
        outputs.append(output)
        if len(outputs) == 2:
            await engine.abort("r")
            await engine.abort("unknown")
    assert outputs[-1].finished
    assert "abort" in {sample.finish_reason for sample in outputs[-1].outputs}
    await until(lambda: is_idle(engine))


async def test_random_cancellation_leaks_nothing(make, toy_executors):
    engine = make(max_num_seqs=4)
    toy_executors[0].step_seconds = 0.0005

    async def one(index):
        generator = engine.generate("a", LONG, f"r{index}")
        for _ in range(index % 7):
            await anext(generator)
        await asyncio.sleep((index % 5) * 0.001)
        await generator.aclose()

    await asyncio.gather(*(one(index) for index in range(300)))
    await until(lambda: is_idle(engine))
    assert len(engine._requests) == engine._requests.num_samples == len(engine._requests._output_processor) == 0
    assert not engine._output_handler._streams


async def test_a_failed_step_is_an_error_for_its_requests_only(make, toy_executors):
    engine = make()
    toy_executors[0].fail_steps = 1
    with pytest.raises(RequestFailedError, match="boom"):
        await collect(engine, "a", GREEDY, "bad")
    assert (await collect(engine, "a", GREEDY, "good"))[-1].outputs[0].text == "bcde"
    engine.check_health()
    assert not engine.errored


def boom_in_step(number):
    def on_step(count):
        if count == number:
            raise RuntimeError("boom")

    return on_step


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
@pytest.mark.parametrize("interval", [1, 100])
async def test_tokens_in_front_of_an_error_are_outputs_of_their_own(make, toy_executors, kind, interval):
    engine = make()
    toy_executors[0].on_step = boom_in_step(20)
    outputs = []
    stream = await engine.add_request("r", "a", LONG.clone(output_kind=kind, stream_interval=interval))

    async def read():
        async for output in stream:
            outputs.append(output)  # noqa: PERF401 -- a comprehension that an error ends keeps nothing

    with pytest.raises(RequestFailedError, match="boom"):
        await read()
    assert not any(output.finished or output.error or output.outputs[0].finish_reason for output in outputs)
    last = outputs[-1:] if kind is RequestOutputKind.CUMULATIVE else outputs
    assert [token_id for output in last for token_id in output.outputs[0].token_ids] == list(range(98, 98 + 19))
    assert interval == 1 or len(outputs) <= 2
    await until(lambda: is_idle(engine))
    assert not engine._output_handler._streams
    assert not len(engine._requests)


async def test_whole_answers_and_those_without_a_token_fail_at_once(make, toy_executors):
    engine = make()
    for number, params in ((5, LONG.clone(output_kind=RequestOutputKind.FINAL_ONLY)), (1, LONG)):
        toy_executors[0].steps.clear()
        toy_executors[0].on_step = boom_in_step(number)
        with pytest.raises(RequestFailedError, match="boom"):
            await anext(await engine.add_request("r", "a", params))


async def test_a_dead_engine_fails_every_request_soon(make, toy_executors):
    engine = make(max_num_seqs=2)
    toy_executors[0].gate.clear()
    tasks = [asyncio.create_task(collect(engine, "a", LONG, f"r{i}")) for i in range(10)]
    await until(lambda: toy_executors[0].steps)
    toy_executors[0].fail_steps = 10**6
    toy_executors[0].gate.set()
    done, pending = await asyncio.wait(tasks, timeout=10)
    assert not pending
    kinds = {type(task.exception()) for task in done}
    assert EngineDeadError in kinds
    assert kinds <= {EngineDeadError, RequestFailedError}
    assert engine.errored
    with pytest.raises(EngineDeadError, match="boom"):
        engine.check_health()
    with pytest.raises(EngineDeadError):
        await collect(engine, "a", GREEDY, "late")


async def test_outputs_that_cannot_be_read_fail_every_request_once(make, monkeypatch):
    engine = make()
    polls = []

    def broken(most=None):
        polls.append(1)
        raise ValueError("garbled")

    monkeypatch.setattr(engine._requests, "poll", broken)
    with pytest.raises(EngineDeadError, match="cannot read the engine's outputs: ValueError: garbled"):
        await collect(engine, "a", LONG, "r")
    await asyncio.sleep(0.05)
    assert len(polls) == 1
    assert engine.errored
    with pytest.raises(EngineDeadError, match="garbled"):
        engine.check_health()


async def test_another_event_loop_is_refused(make):
    engine = make()
    await collect(engine, "a", GREEDY, "r")

    def elsewhere():
        with pytest.raises(RuntimeError, match="belongs to another event loop"):
            asyncio.run(collect(engine, "a", GREEDY, "s"))

    await asyncio.to_thread(elsewhere)


def test_one_loop_after_another(make):
    engine = make()

    async def leave_one_behind():
        await engine.add_request("left", "a", LONG)

    asyncio.run(leave_one_behind())
    assert asyncio.run(collect(engine, "a", GREEDY, "r"))[-1].outputs[0].text == "bcde"
    assert asyncio.run(collect(engine, "a", GREEDY, "left"))[-1].outputs[0].text == "bcde"


async def test_an_idle_engine_uses_no_cpu(make):
    engine = make()
    await collect(engine, "a", GREEDY, "r")
    before = time.process_time()
    await asyncio.sleep(1)
    assert time.process_time() - before < 0.02


async def test_wakes_once_per_step_and_not_per_request(make, toy_executors, monkeypatch):
    engine = make(max_num_seqs=64)
    polls = []
    poll = engine._requests.poll
    monkeypatch.setattr(engine._requests, "poll", lambda most=None: polls.append(1) or poll(most))
    toy_executors[0].gate.clear()
    toy_executors[0].step_seconds = 0.002
    tasks = [asyncio.create_task(collect(engine, "a", LONG.clone(max_tokens=20), f"r{i}")) for i in range(64)]
    await asyncio.sleep(0.05)
    toy_executors[0].gate.set()
    await asyncio.gather(*tasks)
    assert len(polls) <= len(toy_executors[0].steps) + 5


async def test_closing_ends_a_reader_that_waits(make, toy_executors):
    engine = make()
    toy_executors[0].gate.clear()
    stream = await engine.add_request("r", "a", LONG)
    reader = asyncio.create_task(anext(stream))
    await until(lambda: toy_executors[0].steps)
    assert not reader.done()
    stream.close()
    with pytest.raises(StopAsyncIteration):
        async with asyncio.timeout(2):
            await reader


async def test_closing_a_generation_ends_its_merge(make):
    """Several prompts of one HTTP request are read by tasks of their own, which must not outlive it."""
    engine = make()
    state = SimpleNamespace(engine_request_ids=set(), settings=ServerSettings())
    before = asyncio.all_tasks()
    generation = await Generation.start(
        state, SimpleNamespace(engine=engine, max_num_queued=9), ["a", "b"], LONG, "r", 0
    )
    await anext(generation)
    assert asyncio.all_tasks() > before
    await generation.aclose()
    await generation.aclose()
    assert asyncio.all_tasks() == before
    assert not state.engine_request_ids
    await until(lambda: is_idle(engine))


async def test_closing_a_generation_ends_a_merge_that_is_read(make, toy_executors):
    engine = make()
    toy_executors[0].gate.clear()
    state = SimpleNamespace(engine_request_ids=set(), settings=ServerSettings())
    generation = await Generation.start(
        state, SimpleNamespace(engine=engine, max_num_queued=9), ["a", "b"], LONG, "r", 0
    )
    reader = asyncio.create_task(anext(generation))
    await until(lambda: toy_executors[0].steps)
    await generation.aclose()
    with pytest.raises(StopAsyncIteration):
        async with asyncio.timeout(2):
            await reader


@pytest.mark.parametrize("used", [False, True])
async def test_a_dropped_engine_frees_thread_and_model(toy_config, toy_executors, used):
    engine = AsyncLLM.from_engine_config(toy_config("api_server"))
    if used:
        await collect(engine, "a", GREEDY, "r")
    thread, core = engine._client._thread, weakref.ref(engine._client._core)
    dropped, fd = weakref.ref(engine), engine._client.handle.output_fd
    del engine
    gc.collect()
    assert dropped() is None
    await until(lambda: not thread.is_alive() and toy_executors[0].was_shut_down)
    await asyncio.sleep(0)
    assert core() is None
    assert not asyncio.get_running_loop().remove_reader(fd)


EXIT_SCRIPT = """
import asyncio, sys, time
sys.path.insert(0, sys.argv[1])
from conftest import ToyExecutor
from rustvllm import AsyncLLM, SamplingParams
from rustvllm.engine import start as engine_start
from rustvllm.config.engine_args import EngineArgs

class SlowExecutor(ToyExecutor):
    def execute_model(self, output):
        super().execute_model(output)
        print("step", flush=True)

engine_start.make_executor = lambda config, _node_secret: SlowExecutor(config)
args = EngineArgs(model=sys.argv[2], load_format="dummy", device="cpu", max_num_seqs=8, block_size=4)
engine = AsyncLLM.from_engine_config(args.create_engine_config("api_server"))
engine._client._core.executor.step_seconds = float(sys.argv[3])

async def main():
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    await engine.add_request("r", "a", params)
    await asyncio.sleep(0.2)

asyncio.run(main())
print("exit", flush=True)
"""


def test_the_interpreter_waits_for_a_long_step_when_it_exits(toy_model):
    """Longer than a shutdown would wait; with real weights see ``tests/e2e``."""
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", EXIT_SCRIPT, tests, toy_model, "3.0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["exit", "step"]


async def test_stats_and_description(make):
    engine = make(num_gpu_blocks_override=33)
    assert engine.stats()["num_gpu_blocks"] == 33
    text = "\n".join(engine.describe())
    for word in (
        "GPT2LMHeadModel",
        "64 tokens",
        "cpu, float32",
        "32 blocks of 4 tokens = 128 tokens",
        "up to 8 ",
        "2.0",
    ):
        assert word in text


async def test_an_outcome_that_is_waited_for_wakes_no_reader_before(make, monkeypatch):
    engine = make()
    applied = []
    apply = RequestState.apply
    monkeypatch.setattr(RequestState, "apply", lambda *args: applied.append(args) or apply(*args))
    outputs = await collect(engine, "a", LONG.clone(output_kind=RequestOutputKind.FINAL_ONLY), "r")
    assert len(outputs[0].outputs[0].token_ids) == 60
    assert len(applied) == 1
