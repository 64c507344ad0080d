"""The scripts of ``benches/python`` run and say what they should; how fast anything was is not looked at."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture
def run(repository, tmp_path):
    def run(script, *arguments):
        output = tmp_path / "report.json"
        command = [sys.executable, str(repository / "benches/python" / script), "--output-json", str(output)]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, timeout=110)
        assert done.returncode == 0, done.stderr
        report = json.loads(output.read_text())
        assert report["machine"]["cores"] >= 1
        assert report["date"]
        assert script in report["command"]
        assert json.loads(done.stdout) == report
        return report

    return run


def test_serving_cost(run):
    report = run("serving_cost.py", "--sections", "bare,alone", "--concurrency", "2", "--step-time", "0",
                 "--turns", "1", "--tokens", "200", "--output-len", "20", "--requests-alone", "3")  # fmt: skip
    (row,) = report["bare"]
    for name in ("bare", "step 0 ms"):
        assert (row["runs"][name][0]["failed"], row["runs"][name][0]["total_output_tokens"]) == (0, 200)
    assert row["runs"]["bare"][0]["tokens_per_event"] == 1
    assert (report["alone"]["completed"], report["alone"]["failed"]) == (3, 0)


def test_fair_sharing(run):
    # Two at a time, so that the others of the flood wait for as long as it lasts.
    report = run("fair_sharing.py", "--clients", "8", "--num-prompts", "60", "--policies", "fair",
                 "--", "--executor", "sim", "--sim-step-time", "5", "--max-num-seqs", "2")  # fmt: skip
    ((found,),) = report["runs"].values()
    assert (found["flood_completed"], found["flood_failed"], found["small_failures"]) == (60, 0, 0)
    assert found["small_requests"] > 0


def test_hostile_crowd(run):
    report = run("hostile_crowd.py", "--connections", "62", "--crowds", "1")
    (crowd,) = report["crowds"]
    assert (crowd["hung"], crowd["failed"]) == ([], [])
    assert len(crowd["statuses"]) == 31
    assert crowd["statuses"]["good"] == {"200": 2}
    assert crowd["statuses"]["a million stop strings"] == {"413": 2}
    assert crowd["during"]["inter_token_ms"]["count"] > 0
    assert crowd["during"]["health_failures"] == 0


def test_idle_cost(run):
    report = run("idle_cost.py", "--turns", "1", "--seconds", "0.5", "--", "--executor", "sim")
    assert {mode: runs[0]["exit_code"] for mode, runs in report["runs"].items()} == {"process": 0, "thread": 0}
    assert any(name.startswith("engine") for name in report["runs"]["process"][0]["resident_mb"])


def test_our_side_of_the_comparison(run, shared_dir, tmp_path):
    report = run("compare_vllm.py", "--concurrency", "2", "--turns", "1", "--seconds", "0.1",
                 "--tokenizer", str(shared_dir / "data/slm4096-gpt2/hf"),
                 "--log-folder", str(tmp_path / "to/make"))  # fmt: skip
    assert (tmp_path / "to/make/rustvllm.log").stat().st_size
    (result,) = report["results"]
    assert result["runs"]["rustvllm"][0]["failed"] == 0
    assert result["ratios"] is None


def test_health_under_load(run, shared_dir):
    report = run("health_under_load.py", "--streams", "4", "--seconds", "3", "--turns", "1", "--interval", "0.5",
                 "--characters", "20000", "--tokenizer", str(shared_dir / "data/gpt2-tokenizer"))  # fmt: skip
    without, loaded = report["runs"]
    assert without["failed"] == loaded["failed"] == 0
    assert without["health"]["failures"] == loaded["health"]["failures"] == loaded["long_prompts_failed"] == []
    assert loaded["long_prompts_answered"] > 0
    assert loaded["steps"]["count"] > 0


@pytest.mark.parametrize("preempt", [[], ["--preempt"]])
def test_soak(run, shared_dir, preempt):
    tokenizer = str(shared_dir / "data/gpt2-tokenizer")
    report = run("soak.py", "--minutes", "0.07", "--clients", "8", "--tokenizer", tokenizer, *preempt)
    assert report["errors"] == []
    assert report["left"]["is_clean"]
    assert report["gaps"] > 0
    assert report["requests"]["stream done"] > 0


def test_request_limits(run):
    report = run("request_limits.py", "--cases", "bad_words", "sends before it reads", "template, constant",
                 "--step-time", "5")  # fmt: skip
    words, sender, template = report["cases"].values()
    assert (words["status"], sender["status"], template["status"]) == (400, "413", 400)
    assert words["parse_ms"] > 0
    assert 0 < template["start_memory_mb"] < 1000, "the template's constant has a gigabyte"
    for case in (words, sender, template):
        for phase in ("before", "during", "after"):
            assert case[phase]["health_failures"] == 0
            assert case[phase]["health_ms"]["count"] >= 1
            assert case[phase]["inter_token_ms"]["count"] >= 1
            assert case[phase]["memory_mb"] > 0


def test_load_cost(run, shared_dir):
    other = f"{sys.executable} -m rustvllm.cli.main serve --dtype float32"
    report = run("load_cost.py", "--model", str(shared_dir / "data/slm4096-gpt2/hf"), "--turns", "1",
                 "--num-tokens", "64", "--server", other)  # fmt: skip
    assert list(report["runs"]) == ["other", "own"]
    assert report["all_drew_the_same"] is True
    for ((figures,),) in zip(report["runs"].values(), strict=True):
        assert min(figures.values()) > 0
        assert figures["served_mb"] * 1e6 > report["checkpoint_mb"] * 1e6 > 0


def test_turn_streams(run):
    report = run("turn_streams.py", "--streams", "4", "--requests", "4", "--output-len", "20", "--turns", "1",
                 "--scenes", "plain,syntax,thoughts")  # fmt: skip
    assert list(report["scenes"]) == ["plain", "syntax", "thoughts"]
    for scene in report["scenes"].values():
        assert scene["tokens_per_second"] > 0
        assert scene["share_of_plain"]["median"] > 0


def test_api_streams(run):
    scenes = ["chat plain", "messages plain", "responses plain"]
    report = run("api_streams.py", "--streams", "4", "--requests", "4", "--output-len", "20", "--turns", "1",
                 "--scenes", ",".join(scenes))  # fmt: skip
    assert list(report["scenes"]) == scenes
    for scene in report["scenes"].values():
        assert scene["server_cpu_us_per_token"]["median"] > 0
        assert scene["share_of_chat"]["median"] > 0


def test_output_fault(run):
    report = run("output_fault.py", "--seconds", "0.5", "--fault", "unread")
    unread = report["runs"]["unread"]
    assert list(unread) == ["before", "during", "after", "stop"]
    for phase in ("before", "during", "after"):
        assert unread[phase]["health_failures"] == 0
        assert unread[phase]["health_ms"]["count"] >= 1
        assert unread[phase]["lines_made"] >= 1
    assert unread["stop"]["exit_code"] == 0


@pytest.fixture
def subreaper():
    """Orphans come to this process, of the same session: the system does not wake those that are stopped."""
    set_child_subreaper = 36
    ctypes.CDLL(None).prctl(set_child_subreaper, 1)
    yield
    ctypes.CDLL(None).prctl(set_child_subreaper, 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_no_stopped_engine_is_left_behind(repository, tmp_path, subreaper, number):
    scripts = repository / "benches/python"
    (tmp_path / "fake_engine.py").write_text(
        f"import sys; sys.path.insert(0, {str(scripts / 'engines')!r})\n"
        "from worker import serve\n"
        "serve(lambda settings: lambda prompts, max_tokens: [[0] * max_tokens for _ in prompts])\n"
    )
    script = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(scripts)!r})
import compare_offline
compare_offline.ENGINES = Path({str(tmp_path)!r})
compare_offline.end_on_signals()
with compare_offline.Engine("fake", sys.executable, {{}}, {{}}, Path({str(tmp_path / "log")!r})) as engine:
    assert engine.generate([[1], [2]], 3)["token_ids"] == [[0] * 3] * 2
    print(engine._process.pid, flush=True)
    time.sleep(100)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        try:
            pid = int(process.stdout.readline())
            stat = Path(f"/proc/{pid}/stat")
            assert state_once_in(stat, "T") == "T"
            process.send_signal(number)
            assert process.wait(30) == (-number if number == signal.SIGKILL else 128 + number)
        finally:
            process.kill()  # leaving waits for its end: after a failure all of its 100 seconds
    state = state_once_in(stat, "", "Z")
    if state:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert state in ("", "Z")


def state_once_in(stat, *states):
    """The state of a process when it is one of these, or after ten seconds."""
    deadline = time.monotonic() + 10
    while state_of(stat) not in states and time.monotonic() < deadline:
        time.sleep(0.01)
    return state_of(stat)


def state_of(stat):
    """The letter of a process's state; empty if there is none."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""
