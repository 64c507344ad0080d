"""The trace file: strict JSON after its end, readable without, whole with several writers, harmless if unwritable."""

import resource

import pytest

from rustvllm.config.engine_args import EngineArgs
from rustvllm.engine.core import EngineCore
from rustvllm.exceptions import ConfigError
from rustvllm.observe.trace.trace_file import MAX_BUFFERED_BYTES, TraceFile, begin_trace_file, end_trace_file
from rustvllm.observe.trace.tracer import Tracer, TraceRecord
from trace_schema import check_trace


def waiting(request_id, at):
    return TraceRecord(at, "queue", "waiting", request_id, status="WAITING", num_computed_tokens=0, num_tokens=3)


def finished(request_id, at):
    return TraceRecord(at, "update", "finished", request_id, 1, "FINISHED_STOPPED", 3, 4)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_steps_and_requests_of_an_engine(tmp_path, async_scheduling):
    path = tmp_path / "trace.json"
    begin_trace_file(path)
    tracks = 2 if async_scheduling else 1
    tracer = Tracer([TraceFile(path, "engine 0", is_owner=True, num_step_tracks=tracks)])
    args = EngineArgs(
        executor="sim", async_scheduling=async_scheduling, max_num_batched_tokens=16, max_num_seqs=2, sim_step_time=1.0,
        num_gpu_blocks_override=6, max_model_len=64, enable_prefix_caching=False,
    )  # fmt: skip
    core = EngineCore(args.create_engine_config(), tracer)
    for name in ("a", "b"):
        core.handle.add_request(core.handle.new_key(), name, list(range(24)), max_tokens=20)
    while core.has_unfinished_requests():
        core.step()
        core.scheduler.take_outputs()
    core.shutdown()
    tracer.close()
    tracer.close()
    events = check_trace(path.read_text())
    steps = [event for event in events if event.get("cat") == "step"]
    assert len(steps) == core.handle.stats()["num_steps"]
    assert {event["tid"] for event in steps} == set(range(1, 1 + tracks))
    phases = [event["name"] for event in events if event["ph"] == "X" and event["cat"] not in ("step", "model_load")]
    assert phases == ["schedule", "execute", "sample", "update"] * len(steps)
    lives = {name: [(event["ph"], event["name"]) for event in events if event.get("id") == name] for name in ("a", "b")}
    status = ["WAITING", "RUNNING"]
    assert lives["a"] == [("b", "a"), *[(phase, each) for each in status for phase in "be"], ("e", "a")]
    status = ["WAITING", "RUNNING", "PREEMPTED", "RUNNING"]
    assert lives["b"] == [("b", "b"), *[(phase, each) for each in status for phase in "be"], ("e", "b")]
    counters = [event["args"] for event in events if event["ph"] == "C" and event["name"] == "requests"]
    assert max(each["running"] for each in counters) == 2
    assert counters[-1] == {"running": 0, "waiting": 0}


def test_several_write_one_file_which_is_readable_before_its_end(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("what was there before")
    begin_trace_file(path)
    writers = [TraceFile(path, f"engine {index}") for index in range(3)]
    for at in range(200):
        for index, writer in enumerate(writers):
            writer.write(waiting(f"r{index}.{at}", 2 * at))
            if at % 7 == index:
                writer.flush()
    for writer in writers[:2]:
        writer.close()
    text = path.read_text()
    check_trace(text, is_complete=False)
    for index, writer in enumerate(writers[:2]):
        writer.write(finished(f"r{index}.0", 900))  # after its end: nothing
    for at in range(200):
        writers[2].write(finished(f"r2.{at}", 1000 + at))
    writers[2].close()
    end_trace_file(path)
    events = check_trace(path.read_text(), is_complete=False)
    assert sum(event["ph"] == "b" for event in events) == 2 * 600


def test_what_waits_is_bounded(tmp_path):
    path = tmp_path / "trace.json"
    begin_trace_file(path)
    file = TraceFile(path, "engine 0")
    size = path.stat().st_size
    for at in range(4000):
        file.write(waiting(f"request-{at}", at))
    assert path.stat().st_size - size > 4000 * 200 - 2 * MAX_BUFFERED_BYTES


def test_a_full_disk_ends_the_trace_alone(tmp_path, capsys):
    path = tmp_path / "trace.json"
    begin_trace_file(path)
    file = TraceFile(path, "engine 0", is_owner=True)
    file.write(waiting("first", 1))
    file.flush()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, limits[1]))  # as if the disk were full then
    try:
        for at in range(3):
            file.write(waiting(f"r{at}", at))
            file.flush()
        file.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    [line] = [line for line in capsys.readouterr().err.splitlines() if "rustvllm.observe.trace.trace_file" in line]
    assert "ends here, because it cannot be written: only 100 of" in line
    events = check_trace(path.read_text(), is_complete=False)
    assert [event["name"] for event in events if event["ph"] == "b"] == ["first", "WAITING"]


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"trace_file '.*' cannot be written: Is a directory"):
        begin_trace_file(tmp_path)
