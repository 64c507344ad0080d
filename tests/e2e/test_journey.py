"""The journey of a request: its layers in their order, and its numbers against what the request became."""

import asyncio
import itertools
import json
import logging
import re
from operator import attrgetter

import pytest

from rustvllm import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams
from rustvllm.cli.journey_page import WIDTH
from rustvllm.cli.trace import trace
from rustvllm.exceptions import ConfigError, RequestFailedError
from rustvllm.observe.trace.journey import RequestJourney
from rustvllm.observe.trace.tracer import REQUEST_LAYERS, STARTUP_LAYERS, TraceRecord
from trace_schema import check_trace

PROMPT = "Once upon a time there was a little girl who lived in a small house by the sea with her mother"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SMALL = {"max_model_len": 64, "num_gpu_blocks_override": 7, "max_num_batched_tokens": 16}


@pytest.fixture(scope="module")
def told():
    """Everything that the engine of this module has told."""
    return []


@pytest.fixture(scope="module")
def llm(told):
    """One engine with room for little more than one request, four tokens of prompt a step."""
    with LLM(trace=told.append, **SMALL) as llm:
        yield llm


@pytest.fixture
def ask(llm, told):
    """Ask for answers; the outputs, and the journey of each."""

    def ask(prompts, params=GREEDY):
        first = len(told)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return outputs, [RequestJourney.of(output.request_id, told[first:]).records for output in outputs]

    return ask


def assert_in_order(expected, names):
    """``expected`` is a subsequence of ``names``."""
    rest = iter(names)
    missing = [name for name in expected if name not in rest]
    assert not missing, f"{missing} are missing or come too early in {list(names)}"


def told_of(journey, *events):
    return [record for record in journey if record.event in events and record.request_id is not None]


def test_the_start_and_a_request_pass_through_the_layers_in_their_order(llm, told, ask):
    assert_in_order(STARTUP_LAYERS, [record.layer for record in told])
    [output], [journey] = ask(PROMPT)
    assert_in_order(REQUEST_LAYERS, [record.layer for record in journey])
    times = [record.timestamp_ns for record in journey]
    assert times == sorted(times)
    assert {record.request_id for record in journey} == {output.request_id, None}
    assert PROMPT not in repr(told)


def test_the_counters_race_as_the_request_ran(ask):
    [output], [journey] = ask(PROMPT)
    prompt, sampled = output.prompt_token_ids, output.outputs[0].token_ids
    assert len(prompt) > 16, "it comes in pieces"
    [waiting] = told_of(journey, "waiting")
    assert (waiting.status, waiting.num_computed_tokens, waiting.num_tokens) == ("WAITING", 0, len(prompt))
    computed = waiting.num_computed_tokens + (told_of(journey, "scheduled")[0].extras.get("num_cached_tokens", 0))
    blocks = []
    for record in told_of(journey, "scheduled"):
        assert record.status == "RUNNING"
        computed += record.extras["num_scheduled_tokens"]
        assert record.num_computed_tokens == computed <= record.num_tokens
        blocks += record.extras.get("new_block_ids", [])
        assert len(blocks) == record.extras["num_blocks"] == -(-computed // 16)
    assert len(set(blocks)) == len(blocks)
    tokens = told_of(journey, "token")
    assert [record.extras["token_id"] for record in tokens] == sampled
    assert [record.num_tokens for record in tokens] == [len(prompt) + 1 + i for i in range(len(sampled))]
    end = told_of(journey, "finished")[0]
    assert (end.layer, end.status) == ("update", "FINISHED_LENGTH_CAPPED")
    assert end.num_tokens == len(prompt) + len(sampled)
    steps = {record.step for record in told_of(journey, "scheduled")}
    for layer in ("schedule", "execute", "sample", "update"):
        phases = {record.step for record in journey if record.layer == layer and record.request_id is None}
        assert phases == steps
    by_step = {record.step: [] for record in told_of(journey, "scheduled")}
    for record in journey:
        if record.request_id is None and record.step is not None:
            by_step[record.step].append(record)
    for phases in by_step.values():
        assert [phase.layer for phase in phases] == ["schedule", "execute", "sample", "update"]
        ends = [phase.timestamp_ns + phase.duration_ns for phase in phases]
        assert ends[:3] == [phase.timestamp_ns for phase in phases[1:]], "one begins where the other ends"


def test_a_prompt_that_is_known_is_found_in_the_cache(ask):
    prompt = [7] * 33
    ask([prompt])
    [output], [journey] = ask([prompt])
    assert output.num_cached_tokens == 32
    first = told_of(journey, "scheduled")[0]
    assert first.extras["num_cached_tokens"] == 32
    assert (first.num_computed_tokens, first.extras["num_scheduled_tokens"]) == (33, 1)


def test_a_request_that_gives_way_says_so_and_comes_back(ask):
    prompts = [[9] * 20, [11] * 20]
    params = GREEDY.clone(max_tokens=40)
    [_, output], [kept, journey] = ask(prompts, params)
    assert [record.event for record in told_of(kept, "waiting", "preempted")] == ["waiting"]
    names = ["waiting", "scheduled", "token", "preempted", "scheduled", "token", "finished"]
    assert_in_order(names, [record.event for record in journey])
    [gone, *_] = told_of(journey, "preempted")
    assert (gone.layer, gone.status, gone.num_computed_tokens) == ("queue", "PREEMPTED", 0)
    assert gone.num_tokens > 20, "its output is kept"
    assert [record.extras["token_id"] for record in told_of(journey, "token")] == output.outputs[0].token_ids


def test_a_stop_string_ends_the_request_in_the_front_end(ask):
    [whole], _ = ask("Once upon a time")
    stop = whole.outputs[0].text.split()[2]
    [output], [journey] = ask("Once upon a time", GREEDY.clone(stop=[stop]))
    assert output.outputs[0].stop_reason == stop
    assert_in_order(["token", "text", "finished"], [record.event for record in journey])
    [answer] = [record for record in journey if record.layer == "response"]
    assert answer.extras["finish_reason"] == ["stop"]
    ended = [record.status for record in journey if record.layer == "update" and record.request_id]
    assert ended == ["FINISHED_STOPPED"]
    assert journey.index(answer) < len(journey) - 1, "the engine hears of it from the front end"


def test_an_abort_is_the_end_of_the_journey(llm, told):
    engine, first = llm.llm_engine, len(told)
    engine.add_request("left", PROMPT, GREEDY)
    engine.add_request("waits", PROMPT, GREEDY)
    engine.step()
    engine.step()
    engine.abort_request(["left", "waits"])
    while engine.has_unfinished_requests():
        engine.step()
    for name in ("left", "waits"):
        journey = RequestJourney.of(name, told[first:]).records
        ended = [record for record in journey if record.layer == "update" and record.request_id]
        assert [record.status for record in ended] == ["FINISHED_ABORTED"]
        assert journey[-1].layer == "response"
        assert journey[-1].extras["finish_reason"] == ["abort"]


def test_an_error_is_the_end_of_the_journey_and_of_no_other(ask):
    def fail(token_ids, logits):
        raise RuntimeError("out of luck")

    with pytest.raises(RequestFailedError) as caught:
        ask(["Once", "Twice"], [GREEDY.clone(logits_processors=[fail]), GREEDY])
    assert "out of luck" in caught.value.outputs[0].error
    assert caught.value.outputs[1].outputs[0].finish_reason == "length"


def test_the_status_of_a_failed_request_is_error(llm, told):
    def fail(token_ids, logits):
        raise RuntimeError("out of luck")

    first = len(told)
    with pytest.raises(RequestFailedError):
        llm.generate("Once", GREEDY.clone(logits_processors=[fail]), use_tqdm=False)
    ended = [record for record in told[first:] if record.layer == "update" and record.request_id]
    assert [record.status for record in ended] == ["FINISHED_ERROR"]
    assert told[-1].extras["finish_reason"] == ["error"]


def test_a_callback_that_raises_harms_no_request():
    calls = []

    def fail(record):
        calls.append(record)
        raise RuntimeError("no")

    with LLM(trace=fail, executor="sim", max_model_len=64, num_gpu_blocks_override=8) as llm:
        [output] = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 12
    assert len(calls) == 1


def test_a_trace_that_is_neither_yes_nor_no_nor_a_function_is_refused():
    with pytest.raises(ConfigError, match="trace must be True, False or a function"):
        LLM(trace="yes")


def test_the_page_of_the_command_line(capsys, tmp_path):
    path = tmp_path / "trace.json"
    code = trace(
        [PROMPT, "--max-tokens", "4", "--chunk", "16", "--repeat", "2", "--trace-file", str(path), "--color", "never",
         "--num-gpu-blocks-override", "64"]
    )  # fmt: skip
    page = capsys.readouterr().out
    assert code == 0
    assert max(map(len, page.splitlines())) <= WIDTH
    order = [
        *STARTUP_LAYERS,
        "entry",
        "input_processing",
        "queue",
        "schedule",
        "execute",
        "update",
        "detokenise",
        "response",
    ]
    labels = [line[:18].strip() for line in page.splitlines()]
    assert_in_order([layer.replace("_", " ") for layer in order], labels)
    for words in (
        "WAITING → RUNNING, 16 tokens to run; blocks [1]",
        "the prompt goes on: no token",
        "finish_reason length",
    ):
        assert words in page
    assert "16 tokens cached" in page, "the second time"
    assert "FINISHED_LENGTH_CAPPED" in page
    check_trace(path.read_text())


SPECULATION = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": False}
REPEATING = "Tom had a red ball. Tom had a red ball. Tom had a red"


def test_drafts_are_told_with_what_became_of_them():
    told = []
    with LLM(trace=told.append, max_model_len=128, speculative_config=SPECULATION) as llm:
        [output] = llm.generate(
            REPEATING, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), use_tqdm=False
        )
        counted = llm.llm_engine.engine_core.core.scheduler.stats()
    journey = RequestJourney.of(output.request_id, told).records
    verified = told_of(journey, "verified")
    sums = [
        sum(record.extras[name] for record in verified)
        for name in ("num_draft_tokens", "num_accepted_tokens", "num_rejected_tokens")
    ]
    assert sums[:2] == [counted["num_draft_tokens"], counted["num_accepted_tokens"]]
    assert 0 < sums[1] < sums[0] == sums[1] + sums[2]
    for record in verified:
        [scheduled] = [each for each in told_of(journey, "scheduled") if each.step == record.step]
        assert scheduled.extras["num_draft_tokens"] == record.extras["num_draft_tokens"]
        tokens = [each for each in told_of(journey, "token") if each.step == record.step]
        assert 1 <= len(tokens) <= 1 + record.extras["num_accepted_tokens"]  # fewer where the answer ends


def test_the_page_shows_drafts(capsys):
    config = json.dumps(SPECULATION)
    code = trace([REPEATING, "--max-tokens", "40", "--speculative-config", config, "--color", "never"])
    page = capsys.readouterr().out
    assert code == 0
    assert re.search(r"drafts +\d drafted: \d accepted, \d rejected", page)
    assert max(map(len, page.splitlines())) <= WIDTH


def test_every_scene_as_json(capsys):
    scene = ["--json", "--max-model-len", "64", "--num-gpu-blocks-override", "6", "--no-enable-prefix-caching"]
    assert trace([PROMPT, "--max-tokens", "30", "--ignore-eos", "--neighbours", "1", *scene]) == 0
    told = json.loads(capsys.readouterr().out)
    assert_in_order(STARTUP_LAYERS, [record["layer"] for record in told["startup"]])
    [request] = told["requests"]
    events = [record["event"] for record in request["records"]]
    assert_in_order(["waiting", "scheduled", "token", "preempted", "scheduled", "token", "finished"], events)
    sampled = [record["extras"]["token_id"] for record in request["records"] if record["event"] == "token"]
    assert sampled == request["token_ids"]
    assert len(sampled) == 30
    assert trace([PROMPT, "--abort-after", "2", *scene]) == 0
    [request] = json.loads(capsys.readouterr().out)["requests"]
    assert request["finish_reason"] == "abort"
    assert "FINISHED_ABORTED" in [record.get("status") for record in request["records"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "b", "c"], "quote the prompt"),
        (["a", "--chunk", "0"], "must be a whole number from 1"),
        (["a", "--chunk", "4", "--max-num-batched-tokens", "4"], "leave one out"),
        (["a", "--colour"], "did you mean --color?"),
    ],
)
def test_wrong_usage_is_refused(capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        trace(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_what_cannot_be_asked_is_an_error(capsys):
    assert trace(["x " * 600, "--executor", "sim"]) == 1
    assert "maximum context length is 512" in capsys.readouterr().err
    assert trace(["x", "--otlp-traces-endpoint", "http://user:word@host/"]) == 1
    assert "OTEL_EXPORTER_OTLP_HEADERS" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--runner", "pooling"], ["--convert", "classify"]])
def test_an_engine_that_generates_no_text_is_refused_before_its_model_is_loaded(capsys, monkeypatch, flags):
    monkeypatch.setattr("rustvllm.engine.llm_engine.LLMEngine.__init__", lambda *_: pytest.fail("it is loaded"))
    assert trace(["Once upon a time", *flags, "--executor", "sim"]) == 1
    assert "generates no text" in capsys.readouterr().err


SIM = {"executor": "sim", "max_model_len": 64, "num_gpu_blocks_override": 16, "max_num_seqs": 4}


async def test_an_engine_in_a_thread_calls_the_function_for_both_halves():
    told = []
    engine = AsyncLLM(AsyncEngineArgs(**SIM).create_engine_config(), trace=told.append)
    try:
        async for output in engine.generate([1, 2, 3], GREEDY, "mine"):
            last = output
        left = engine.generate([1, 2, 3], GREEDY.clone(max_tokens=60), "left")
        await anext(left)
        await left.aclose()
    finally:
        engine.shutdown()
    journey = RequestJourney.of("mine", sorted(told, key=attrgetter("timestamp_ns"))).records
    assert_in_order([layer for layer in REQUEST_LAYERS if layer != "response"], [record.layer for record in journey])
    assert [record.extras["token_id"] for record in told_of(journey, "token")] == last.outputs[0].token_ids
    assert "abandoned" in [record.event for record in told if record.request_id == "left"]


async def test_an_engine_in_a_process_writes_into_the_file_of_its_front_end(tmp_path):
    path = tmp_path / "trace.json"
    told = []
    config = AsyncEngineArgs(**SIM, trace_file=str(path)).create_engine_config()
    engine = AsyncLLM(config, multiprocess=True, trace=told.append)
    try:
        async for _ in engine.generate([1, 2, 3], GREEDY, "mine"):
            pass
    finally:
        engine.shutdown()
    events = check_trace(path.read_text())
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"AsyncLLM", "engine 0"}
    assert sum(event.get("cat") == "step" for event in events) == GREEDY.max_tokens
    assert {record.layer for record in told} == {
        "engine_client", "tokenizer", "entry", "input_processing", "detokenise", "response",
    }  # fmt: skip


def test_several_samples_are_one_journey():
    told = []
    with LLM(trace=told.append, **SIM) as llm:
        [output] = llm.generate([[1, 2, 3]], SamplingParams(n=2, max_tokens=3, seed=1), use_tqdm=False)
    journey = RequestJourney.of(output.request_id, told)
    ids = {record.request_id for record in journey.records} - {None}
    assert ids == {output.request_id, f"0_{output.request_id}", f"1_{output.request_id}"}
    told_json = journey.as_json()
    assert [each["index"] for each in told_json] == sorted(each["index"] for each in told_json)
    assert told_json[0]["at_ms"] == 0
    assert journey.as_json(since=len(journey) - 1)[0]["index"] == len(journey) - 1
    json.dumps(told_json)


def test_a_full_journey_drops_its_oldest_records():
    journey = RequestJourney("a", max_records=3)
    for at in range(5):
        journey.add(TraceRecord(at, "sample", "token", "a"))
    assert journey.num_dropped == 2
    assert [each["index"] for each in journey.as_json()] == [2, 3, 4]


def test_a_start_is_told_in_the_order_of_its_times(told, llm):
    times = [record.timestamp_ns for record in told if record.layer in STARTUP_LAYERS]
    assert len(times) >= len(STARTUP_LAYERS)
    assert times == sorted(times)
    records = []
    AsyncLLM(AsyncEngineArgs(executor="sim", **SMALL).create_engine_config(), trace=records.append).shutdown()
    assert {"engine_client", "tokenizer", "model_load"} <= {record.layer for record in records}
    assert [record.timestamp_ns for record in records] == sorted(record.timestamp_ns for record in records)


SCARCE = {"executor": "sim", "max_model_len": 64, "num_gpu_blocks_override": 5, "async_scheduling": False}


def test_every_change_of_a_status_is_told():
    changes = []
    with LLM(on_status_change=lambda *change: changes.append(change), **SCARCE) as llm:
        outputs = llm.generate([[9] * 20, [11] * 20], GREEDY.clone(max_tokens=40), use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [40, 40]
    of = {name: [(old, new) for request_id, old, new in changes if request_id == name] for name in "01"}
    assert of["0"] == [(None, "WAITING"), ("WAITING", "RUNNING"), ("RUNNING", "FINISHED_LENGTH_CAPPED")]
    assert ("RUNNING", "PREEMPTED") in of["1"], "there is room for one of them"
    assert ("PREEMPTED", "RUNNING") in of["1"]
    for (_, new), (old, _) in itertools.pairwise(of["1"]):
        assert old == new, "each begins where the last one ended"


def test_an_asynchronous_engine_tells_of_statuses_too():
    changes = []
    config = AsyncEngineArgs(**SCARCE).create_engine_config()
    engine = AsyncLLM(config, multiprocess=False, on_status_change=lambda *change: changes.append(change))

    async def main():
        params = GREEDY.clone(n=2, temperature=1)
        return [output async for output in engine.generate([5], params, "a")][-1]

    try:
        assert asyncio.run(main()).finished
    finally:
        engine.shutdown()
    assert {name for name, _, _ in changes} == {"0_a", "1_a"}
    assert [new for name, _, new in changes if name == "0_a"] == ["WAITING", "RUNNING", "FINISHED_LENGTH_CAPPED"]
    with pytest.raises(ConfigError, match="on_status_change needs the engine in a thread of this process"):
        AsyncLLM(config, multiprocess=True, on_status_change=changes.append)


@pytest.fixture
def journey_lines():
    """What the logger ``rustvllm.trace`` gets; its level is as it was afterwards."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelno, record.getMessage().split()[1:3]))
    logger, root = logging.getLogger("rustvllm.trace"), logging.getLogger("rustvllm")
    level = root.level
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
    root.setLevel(level)


def test_the_log_at_level_debug_shows_a_journey_and_only_then(journey_lines):
    root = logging.getLogger("rustvllm")
    with LLM(**SCARCE) as llm:
        watch = llm.llm_engine.engine_core.core.watch
        llm.generate([[5]], GREEDY, use_tqdm=False)
        assert journey_lines == []
        assert watch.tracer is None
        root.setLevel(logging.DEBUG)
        llm.generate([[5]], GREEDY.clone(max_tokens=2), use_tqdm=False)
        assert {level for level, _ in journey_lines} == {logging.DEBUG}
        said = {words[0] for _, words in journey_lines}
        assert said == {
            "LLMEngine", "InputProcessor", "Scheduler", "ModelRunner", "Sampler", "EngineCore", "OutputProcessor",
        }  # fmt: skip
        journey_lines.clear()
        root.setLevel(logging.INFO)
        llm.generate([[5]], GREEDY, use_tqdm=False)
        assert journey_lines == []
        assert watch.tracer is None, "nothing is recorded either"


def test_an_engine_that_is_made_at_level_debug_shows_its_start(journey_lines):
    logging.getLogger("rustvllm").setLevel(logging.DEBUG)
    config = AsyncEngineArgs(**SCARCE).create_engine_config()
    engine = AsyncLLM(config, multiprocess=False)

    async def main():
        return [output async for output in engine.generate([5], GREEDY, "a")]

    try:
        assert asyncio.run(main())
    finally:
        engine.shutdown()
    said = {words[0] for _, words in journey_lines}
    assert {"EngineCoreClient", "Tokenizer", "EngineCore", "AsyncLLM", "Scheduler", "Sampler"} <= said
    assert journey_lines.count((logging.DEBUG, ["AsyncLLM", "a"])) == 2, "its entry and its end, each once"
