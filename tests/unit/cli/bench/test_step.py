"""``rustvllm bench step``: one JSON object, a table, the steady state it measures, and mistakes."""

import json

import pytest

from rustvllm import _core
from rustvllm.cli.bench.step import MAX_NUM_RUNNING, MAX_PREFILL_TOKENS, MAX_STEPS, MODES, POLICIES, SteadyState
from rustvllm.cli.main import main

ROW = {"num_running", "schedule_us", "update_us", "total_us", "rust_total_us", "num_blocks", "mode"}


def test_it_prints_one_json_object(capsys):
    assert main(["bench", "step", "--num-running", "1,8", "--prefill-tokens", "0,32", "--steps", "20", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"machine", "versions", "build_profile", "results"}
    assert report["build_profile"] == "release"
    assert report["machine"]["processor"]
    assert report["machine"]["cores"] >= 1
    assert {"rustvllm", "python", "numpy"} <= set(report["versions"])
    rows = report["results"]
    assert [(row["num_running"], row["prefill_tokens"]) for row in rows if row["mode"] == "sync"] == [
        (1, 0),
        (8, 0),
        (1, 32),
        (8, 32),
    ]
    for row in rows:
        assert set(row) >= ROW
        assert 0 < max(row["schedule_us"], row["update_us"]) <= row["total_us"]
        assert row["rust_total_us"] > 0


def test_it_prints_a_table(capsys):
    assert main(["bench", "step", "--num-running", "3", "--steps", "5"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["mode", "num_running"]
    assert [row.split()[:2] for row in rows] == [[mode, "3"] for mode in MODES]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_policy_is_that_of_the_scheduler_measured(policy, capsys):
    assert SteadyState(2, 0, 1, policy).config.scheduling_policy == policy
    argv = ["bench", "step", "--num-running", "2", "--steps", "5", "--json", "--scheduling-policy", policy]
    assert main(argv) == 0
    assert {row["scheduling_policy"] for row in json.loads(capsys.readouterr().out)["results"]} == {policy}
    with pytest.raises(ValueError, match="scheduling_policy must be 'fcfs', 'priority' or 'fair', got \"last\""):
        _core.bench_step(1, 1, scheduling_policy="last")


@pytest.mark.parametrize("prefill_tokens", [0, 40])
@pytest.mark.parametrize("steps_in_flight", MODES.values())
def test_both_languages_measure_the_same_pool(prefill_tokens, steps_in_flight):
    state = SteadyState(20, prefill_tokens, steps_in_flight)
    # Longer than a decode lives: those that end are replaced.
    schedule_us, update_us = state.measure(1100)
    assert len(schedule_us) == len(update_us) == 1100
    stats = state._scheduler.stats()
    assert stats["num_preemptions"] == 0
    assert stats["num_finished"] >= 40
    rust = _core.bench_step(20, 5, prefill_tokens=prefill_tokens, steps_in_flight=steps_in_flight)
    assert rust["num_blocks"] == state.config.num_blocks


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num-running", "0"], "must be whole numbers between 1 and 32768, separated by commas, got '0'"),
        (["--num-running", "4,-1"], "got '4,-1'"),
        (["--num-running", "many"], "got 'many'"),
        (["--num-running", ""], "got ''"),
        (["--num-running", "1,,2"], "got '1,,2'"),
        (["--num-running", "1.5"], "got '1.5'"),
        (["--num-running", "9" * 40], "between 1 and 32768"),
        (["--steps", "0"], "must be a whole number between 1 and 1000000, got '0'"),
        (["--steps", "nan"], "got 'nan'"),
        (["--prefill-tokens", "1048577"], "between 0 and 1048576"),
        (["--jsn"], "unknown argument --jsn; did you mean --json?"),
        (["extra"], "unknown argument extra"),
    ],
)
def test_wrong_usage(capsys, argv, message):
    with pytest.raises(SystemExit) as caught:
        main(["bench", "step", *argv])
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_the_limits_are_those_of_the_core():
    for wrong in [
        lambda: _core.bench_step(MAX_NUM_RUNNING + 1, 1),
        lambda: _core.bench_step(1, MAX_STEPS + 1),
        lambda: _core.bench_step(1, 1, prefill_tokens=MAX_PREFILL_TOKENS + 1),
        lambda: _core.bench_step(1, 1, steps_in_flight=max(MODES.values()) + 1),
    ]:
        with pytest.raises(ValueError, match="must be"):
            wrong()
