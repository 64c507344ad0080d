"""Records, their two plain sinks, and what never gets into a log."""

import logging

import pytest

from rustvllm.observe.trace.tracer import (
    COMPONENTS,
    LAYERS,
    CallbackSink,
    LogSink,
    StatusSink,
    Tracer,
    TraceRecord,
    format_blocks,
    format_duration,
    format_record,
    masked_command_line,
)


@pytest.fixture
def lines():
    """What the logger ``rustvllm.trace`` gets."""
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append((record.levelno, record.getMessage()))
    logger = logging.getLogger("rustvllm.trace")
    logger.addHandler(handler)
    yield told
    logger.removeHandler(handler)


def test_a_record_as_json_has_no_holes():
    record = TraceRecord(5, "queue", "waiting", "a", status="WAITING", num_computed_tokens=0, num_tokens=3)
    assert record.as_dict() == {
        "timestamp_ns": 5, "layer": "queue", "event": "waiting", "request_id": "a", "status": "WAITING",
        "num_computed_tokens": 0, "num_tokens": 3, "component": "Scheduler",
    }  # fmt: skip


def test_a_line_of_the_log_has_layer_request_event_and_numbers(lines):
    tracer = Tracer([LogSink()])
    extras = {"num_scheduled_tokens": 2, "new_block_ids": [4, 5, 6, 9]}
    tracer.write(TraceRecord(1_500_000_000, "schedule", "scheduled", "a", 7, "RUNNING", 12, 14, 23_400, extras))
    [(level, line)] = lines
    assert level == logging.INFO
    assert line.split() == [
        "1.500000", "Scheduler", "step", "7", "a", "scheduled", "RUNNING", "12/14", "num_scheduled_tokens=2",
        "new_block_ids=[4-6", "9]", "(23.4", "µs)",
    ]  # fmt: skip


def test_a_log_of_json_has_the_record(monkeypatch):
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.fields)
    monkeypatch.setenv("RUSTVLLM_LOGGING_FORMAT", "json")
    logger = logging.getLogger("rustvllm.trace")
    logger.addHandler(handler)
    try:
        extras = {"token_id": 31337, "new_block_ids": [1], "model": "hf_abcdefghijk"}
        LogSink().write(TraceRecord(5, "sample", "token", "a", step=2, extras=extras))
    finally:
        logger.removeHandler(handler)
    [fields] = told
    assert fields == {
        "trace": {
            "timestamp_ns": 5, "layer": "sample", "event": "token", "request_id": "a", "step": 2,
            "extras": {"new_block_ids": [1], "model": "***"}, "component": "Sampler",
        }
    }  # fmt: skip


def test_every_layer_has_a_component_by_the_fields_name():
    assert set(COMPONENTS) == set(LAYERS)
    named = {"AsyncLLM", "InputProcessor", "OutputProcessor", "EngineCoreClient", "EngineCore", "Scheduler"}
    assert named | {"ModelRunner", "Sampler"} <= set(COMPONENTS.values())
    assert TraceRecord(0, "update", "updated", component="EngineCore").component == "EngineCore"


def test_lines_below_the_level_are_not_made(lines, monkeypatch):
    monkeypatch.setattr(logging.getLogger("rustvllm.trace"), "level", logging.WARNING)
    logging.getLogger("rustvllm.trace").manager._clear_cache()
    LogSink().write(TraceRecord(0, "queue", "waiting", "a"))
    assert lines == []
    logging.getLogger("rustvllm.trace").manager._clear_cache()


def test_each_change_of_a_status_is_told_once():
    told = []
    sink = StatusSink(lambda *change: told.append(change))
    for request_id, status in [
        ("a", "WAITING"), ("a", "RUNNING"), ("b", "WAITING"), ("a", "RUNNING"), (None, None), ("a", "PREEMPTED"),
        ("a", None), ("a", "RUNNING"), ("a", "FINISHED_STOPPED"), ("a", "WAITING"), ("b", "FINISHED_ABORTED"),
    ]:  # fmt: skip
        sink.write(TraceRecord(0, "queue", "x", request_id, status=status))
    assert told == [
        ("a", None, "WAITING"), ("a", "WAITING", "RUNNING"), ("b", None, "WAITING"), ("a", "RUNNING", "PREEMPTED"),
        ("a", "PREEMPTED", "RUNNING"), ("a", "RUNNING", "FINISHED_STOPPED"), ("a", None, "WAITING"),
        ("b", "WAITING", "FINISHED_ABORTED"),
    ]  # fmt: skip
    sink.close()
    sink.write(TraceRecord(0, "queue", "x", "c", status="WAITING"))
    assert len(told) == 8


def test_a_status_hook_that_raises_is_called_no_more(lines):
    calls = []

    def fail(*change):
        calls.append(change)
        raise RuntimeError("no room")

    sink = StatusSink(fail)
    for request_id in "ab":
        sink.write(TraceRecord(0, "queue", "waiting", request_id, status="WAITING"))
    assert calls == [("a", None, "WAITING")]
    [(level, line)] = lines
    assert level == logging.ERROR
    assert "not called again" in line


def test_the_log_has_no_token_and_no_client_writes_a_line_of_its_own_into_it():
    token = TraceRecord(0, "sample", "token", "a", extras={"token_id": 31337})
    assert "31337" not in format_record(token)
    forged = TraceRecord(0, "entry", "POST /v1\nERROR all is lost", "a\x1b[2J")
    assert format_record(forged).isprintable()
    assert "\\n" in format_record(forged)


def test_a_callback_that_raises_is_told_of_and_called_no_more(lines):
    calls, others = [], []

    def fail(record):
        calls.append(record)
        raise RuntimeError("no room")

    tracer = Tracer([CallbackSink(fail), CallbackSink(others.append)])
    for index in range(3):
        tracer.write(TraceRecord(index, "queue", "waiting"))
    assert len(calls) == 1
    assert len(others) == 3
    [(level, line)] = lines
    assert level == logging.ERROR
    assert "not called again" in line


def test_sinks_come_and_go():
    first, second = [], []
    tracer, sink = Tracer([CallbackSink(first.append)]), CallbackSink(second.append)
    tracer.note("tokenizer", "read")
    tracer.add_sink(sink)
    tracer.note("engine_client", "here")
    tracer.remove_sink(sink)
    tracer.remove_sink(sink)
    tracer.note("model_load", "executor", 0)
    assert [record.layer for record in first] == ["tokenizer", "engine_client", "model_load"]
    assert [record.layer for record in second] == ["engine_client"]
    assert first[2].timestamp_ns == 0
    assert first[2].duration_ns > 0
    assert all(record.layer in LAYERS for record in first)
    tracer.close()
    tracer.note("tokenizer", "read")
    assert len(first) == 3


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [(0, "0 µs"), (999, "0.999 µs"), (23_400, "23.4 µs"), (999_400, "999 µs"), (999_600, "1 ms"), (2.5e9, "2.5 s")],
)
def test_durations(nanoseconds, text):
    assert format_duration(nanoseconds) == text


def test_blocks_are_drawn_together():
    assert format_blocks([1, 2, 3, 7, 9, 10]) == "1-3 7 9-10"
    assert format_blocks([]) == ""


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["serve", "--api-key", "one", "two", "--port", "1"], "serve --api-key *** *** --port 1"),
        (["serve", "--api-key=one"], "serve --api-key=***"),
        (
            ["serve", "--hf_token", "x", "--max-num-batched-tokens", "5"],
            "serve --hf_token *** --max-num-batched-tokens 5",
        ),
        (["serve", "hf_abcdefghij"], "serve ***"),
        (["serve", "--engine-secret-file", "/run/x"], "serve --engine-secret-file /run/x"),
    ],
)
def test_a_command_line_has_no_secrets(given, shown):
    assert masked_command_line(given) == shown
