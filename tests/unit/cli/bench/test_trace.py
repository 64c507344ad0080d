"""``rustvllm bench trace``: one JSON object, a summary, and mistakes."""

import json

import pytest

from rustvllm.cli.main import main

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50,396,9\r\n"


@pytest.fixture
def azure(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(AZURE, newline="")
    return str(path)


@pytest.fixture
def mooncake(tmp_path):
    line = {"timestamp": 0, "input_length": 1100, "output_length": 3, "hash_ids": [0, 1, 2]}
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line | {"timestamp": 10 * place}) + "\n" for place in range(4)))
    return str(path)


def run(capsys, *argv):
    assert main(["bench", "trace", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_it_prints_one_json_object(capsys, mooncake):
    report = run(capsys, mooncake)
    assert {"machine", "versions", "build_profile", "step_time_model", "max_model_len"} <= set(report)
    assert (report["format"], report["trace"], report["requests"]) == ("mooncake", mooncake, 4)
    # 68 full blocks each; the last three find all of them: the last token is in none.
    assert (report["full_blocks"], report["hit_blocks"], report["prefix_hit_rate"]) == (272, 204, 0.75)
    assert (report["output_tokens"], report["preemptions"], report["refused"]) == (12, 0, {})
    assert (report["block_size"], report["num_blocks"]) == (16, 16384)
    parts = [report[name] for name in ("add_s", "schedule_s", "update_s", "drain_s")]
    assert report["control_plane_s"] == pytest.approx(sum(parts))
    assert list(report["queue_time_s"]) == ["p50", "p90", "p99", "max"]
    assert report["steps"] >= 3


def test_flags_reach_the_replay(capsys, mooncake, azure):
    report = run(capsys, mooncake, "--limit", "2", "--block-size=512", "--num_blocks", "2K", "--max-num-seqs", "1")
    assert (report["requests"], report["full_blocks"], report["hit_blocks"]) == (2, 4, 2)
    assert (report["num_blocks"], report["max_num_seqs"], report["max_num_running"]) == (2048, 1, 1)
    assert run(capsys, mooncake, "--no-enable-prefix-caching")["hit_blocks"] == 0
    report = run(capsys, azure, "--format", "azure", "--step-base-us", "1000", "--step-per-token-us", "0")
    assert report["step_time_model"]["base_us"] == 1000
    # An idle trace: each request runs alone, one millisecond (and a bit for its context) per token.
    assert report["steps"] == 44 + 9
    assert report["virtual_s"] == pytest.approx(3.3194100 + 0.009, abs=1e-3)
    assert run(capsys, azure, "--num-blocks", "27")["refused"] == {"never_fits": 1}


def test_it_prints_a_summary(capsys, azure):
    assert main(["bench", "trace", azure]) == 0
    text = capsys.readouterr().out
    for part in ("(azure)", "control plane", "prefix hit rate", "preemptions", "queue time"):
        assert part in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no requests"),
        ("hello\n", "unknown trace format, the first line is"),
        ('{"timestamp": 0, "input_len', "line 1: not valid JSON"),
        (AZURE + "2023-11-16 18:15:51,-4,9\n", "line 4: ContextTokens must be a whole number between 1 and"),
    ],
)
def test_a_file_that_is_no_trace(capsys, tmp_path, content, message):
    path = tmp_path / "wrong"
    path.write_text(content)
    assert main(["bench", "trace", str(path), "--json"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("rustvllm bench trace: error: ")
    assert str(path) in captured.err
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--block-size", "0"], "block_size must be between 1 and 1024, got 0"),
        (["--num-blocks", "1"], "num_blocks must be between 2 and 134217728, got 1"),
        (["--num-blocks", "100M", "--block-size", "1024"], "num_blocks must be at most 2097151 with block_size 1024"),
        (["--max-num-seqs", "0"], "max_num_seqs must be between 1 and 65536, got 0"),
        (["--step-base-us", "-1"], "base_us must be between 0 and 1000000 microseconds, got -1"),
        (["--step-base-us", "nan"], "got NaN"),
        (["--step-base-us", "0", "--step-per-token-us", "0"], "a step must take time"),
    ],
)
def test_numbers_outside_their_limits(capsys, azure, argv, message):
    assert main(["bench", "trace", azure, *argv]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: FILE"),
        (["f", "g"], "unknown argument g"),
        (["f", "--num-block", "3"], "did you mean --num-blocks?"),
        (["f", "--num-blocks", "-3"], "must be a whole number between 0 and 4294967295, got '-3'"),
        (["f", "--limit", "0"], "must be a whole number between 1 and"),
        (["f", "--step-base-us", "fast"], "must be a number of microseconds, got 'fast'"),
        (["f", "--format", "csv"], "invalid choice: 'csv'"),
    ],
)
def test_wrong_usage(capsys, argv, message):
    with pytest.raises(SystemExit) as caught:
        main(["bench", "trace", *argv])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_files_that_cannot_be_read(capsys, tmp_path):
    for path, message in [
        (tmp_path / "missing", "No such file or directory"),
        (tmp_path, "is not a regular file"),
        ("/dev/null", "is not a regular file"),
    ]:
        assert main(["bench", "trace", str(path)]) == 1
        assert message in capsys.readouterr().err
