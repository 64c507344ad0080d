"""``rustvllm bench throughput``, ``latency`` and ``startup`` over simulated steps."""

import json
import statistics

import pytest

from rustvllm import LLM
from rustvllm.cli.main import main

SIM = ["--executor", "sim", "--max-num-seqs", "8"]
COMMON = {"machine", "versions", "build_profile", "model_id", "executor", "input_len", "output_len"}


def run(capsys, *argv):
    assert main(["bench", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_throughput(capsys, tmp_path):
    path = tmp_path / "report.json"
    lengths = ["--input-len", "20", "--output-len", "6", "--num-prompts", "30"]
    report = run(capsys, "throughput", *SIM, *lengths, "--sim-step-time", "2", "--output-json", str(path))
    assert json.loads(path.read_text()) == report
    assert set(report) >= COMMON
    assert (report["num_requests"], report["total_num_tokens"], report["total_output_tokens"]) == (30, 780, 180)
    # Eight at a time and six steps each take four rounds of steps of two milliseconds.
    assert report["elapsed_time"] >= 4 * 6 * 0.002
    assert report["requests_per_second"] == pytest.approx(30 / report["elapsed_time"])
    assert report["tokens_per_second"] == pytest.approx(780 / report["elapsed_time"])
    assert main(["bench", "throughput", *SIM, "--input-len", "8", "--output-len", "2", "--num-prompts", "3"]) == 0
    assert "output tokens/s" in capsys.readouterr().out


def test_throughput_compared_with_transformers(capsys, monkeypatch):
    # Threads of a model this small wait for each other, for seconds on a busy machine.
    monkeypatch.setattr("rustvllm.cli.bench.transformers_generate.num_compute_threads", lambda: 1)
    argv = ["--device", "cpu", "--input-len", "9", "--output-len", "5", "--num-prompts", "6", "--max-num-seqs", "4"]
    report = run(capsys, "throughput", *argv, "--compare", "transformers")["comparison"]
    assert report["batch_size"] == 4
    ours, theirs = report["output_tokens_per_second"], report["output_tokens_per_second_of_transformers"]
    assert len(ours) == len(theirs) == 3
    assert report["ratios"] == [pytest.approx(one / other) for one, other in zip(ours, theirs, strict=True)]
    assert report["median_ratio"] == sorted(report["ratios"])[1]
    assert main(["bench", "throughput", *argv, "--compare", "transformers"]) == 0
    assert "transformers: " in capsys.readouterr().out


@pytest.mark.parametrize("name", ["repeat", "edit"])
def test_throughput_of_texts_that_drafts_may_foresee(capsys, name):
    argv = ["--device", "cpu", "--input-len", "96", "--output-len", "40", "--num-prompts", "2", "--dataset-name", name]
    report = run(capsys, "throughput", *argv)
    assert (report["dataset_name"], report["total_num_tokens"]) == (name, 2 * 136)
    assert "num_draft_tokens" not in report
    config = '{"method": "auto", "adaptive": false}'
    report = run(capsys, "throughput", *argv, "--speculative-config", config)
    assert (report["dataset_name"], report["total_output_tokens"]) == (name, 80)
    assert 0 < report["num_accepted_tokens"] <= report["num_draft_tokens"]


def test_nothing_to_compare_with(capsys):
    assert main(["bench", "throughput", *SIM, "--compare", "transformers"]) != 0
    assert "--executor sim has none" in capsys.readouterr().err
    assert main(["bench", "throughput", "--device", "cpu", "--compare", "transformers", "--n", "2"]) == 1
    assert "compares one answer to each prompt, but --n is 2" in capsys.readouterr().err


def test_several_answers_to_each_prompt(capsys):
    lengths = ["--input-len", "20", "--output-len", "6", "--n", "3", "--disable-detokenize"]
    report = run(capsys, "throughput", *SIM, *lengths, "--num-prompts", "5")
    assert (report["n"], report["num_requests"], report["total_output_tokens"]) == (3, 5, 5 * 3 * 6)
    assert report["total_num_tokens"] == 5 * 20 + 5 * 3 * 6
    report = run(capsys, "latency", *SIM, *lengths, "--batch-size", "2", "--num-iters", "2", "--sim-step-time", "2")
    assert report["n"] == 3
    assert min(report["latencies"]) >= 6 * 0.002


def test_answers_without_text(capsys, monkeypatch):
    generate, made = LLM.generate, []

    def note(*args, **options):
        made.extend(generate(*args, **options))
        return made

    monkeypatch.setattr(LLM, "generate", note)
    argv = ["latency", *SIM, "--input-len", "8", "--output-len", "4", "--num-iters", "1", "--num-iters-warmup", "0"]
    run(capsys, *argv)
    assert made
    assert all(output.outputs[0].text for output in made)
    made.clear()
    run(capsys, *argv, "--disable-detokenize")
    assert made
    assert [output.outputs[0].text for output in made] == [""] * len(made)


def test_latency(capsys):
    argv = [
        "--input-len",
        "40",
        "--output-len",
        "5",
        "--batch-size",
        "4",
        "--num-iters",
        "3",
        "--num-iters-warmup",
        "1",
    ]
    report = run(capsys, "latency", *SIM, *argv, "--sim-step-time", "3", "--sim-time-per-token", "0.1")
    assert set(report) >= COMMON
    assert len(report["latencies"]) == 3
    # The prompts are computed each time: 160 tokens of them, and 16 more.
    assert min(report["latencies"]) >= 5 * 0.003 + 176 * 0.0001
    assert report["avg_latency"] == pytest.approx(sum(report["latencies"]) / 3)
    assert report["percentiles"]["50"] == sorted(report["latencies"])[1]
    assert report["std_latency"] == pytest.approx(statistics.pstdev(report["latencies"]))
    assert main(["bench", "latency", *SIM, *argv]) == 0
    assert capsys.readouterr().out.startswith("Avg latency:")


def test_startup(capsys):
    argv = ["--num-iters", "1", "--", "--executor", "sim"]
    assert main(["bench", "startup", "--json", *argv]) == 0
    captured = capsys.readouterr()
    first, second = captured.err.splitlines()
    assert first.startswith("rustvllm bench startup: first start: listening ")
    assert second.startswith("rustvllm bench startup: start 1 of 1: listening ")
    report = json.loads(captured.out)
    assert report["serve_arguments"] == ["--executor", "sim"]
    [start] = report["starts_s"]
    for times in (start, report["first_start_s"], report["median_s"]):
        assert 0 < times["listening"] < times["ready"] < times["first_token"] < 60


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["throughput", *SIM, "--input-len", "500", "--output-len", "13"], "exceed the model's 512 tokens"),
        (["latency", *SIM, "--input-len", "8", "--output-len", "2", "--output-json", "/no/such/x"], "cannot write"),
        (["throughput", "--model", "/no/such/folder"], "/no/such/folder"),
        (["startup", "--", "--port", "70000"], "did not become ready; its last output: rustvllm serve: error:"),
    ],
)
def test_what_cannot_be_run(capsys, argv, message):
    assert main(["bench", *argv]) == 1
    err = capsys.readouterr().err
    assert message in err
    assert err.splitlines()[-1].startswith(f"rustvllm bench {argv[0]}: error: ")


@pytest.mark.parametrize("command", ["throughput", "latency"])
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--runner", "pooling"],
            "measures generated text, but rustvllm-tiny makes embeddings here and generates no text",
        ),
        (["--input-len", "500", "--output-len", "13"], "exceed the model's 512 tokens"),
        (["--output-json", "/no/such/x"], "cannot write --output-json /no/such/x: No such file or directory"),
        (["--output-json", "/"], "cannot write --output-json /: Is a directory"),
        (["--input-len", "8", "--output-json", ""], "cannot write --output-json : Is a directory"),
    ],
)
def test_what_the_configuration_rules_out_loads_no_model(monkeypatch, capsys, command, argv, message):
    def load(*_, **__):
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(LLM, "__init__", load)
    assert main(["bench", command, *argv]) == 1
    assert message in capsys.readouterr().err
    with pytest.raises(AssertionError, match="the model is loaded"):
        main(["bench", command, "--input-len", "8", "--output-len", "2"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["throughput", "--num-prompts", "0"], "must be a whole number between 1 and"),
        (["throughput", "--n", "0"], "--n: must be a whole number between 1 and"),
        (["latency", "--num-iters", "nan"], "--num-iters: must be a whole number between 1 and"),
        (["latency", "--batchsize", "3"], "did you mean --batch-size?"),
        (["startup", "--num-iters", "0"], "between 1 and 1000"),
        (["startup", "--executor", "sim"], "unknown argument --executor"),
    ],
)
def test_wrong_usage(capsys, argv, message):
    with pytest.raises(SystemExit) as caught:
        main(["bench", *argv])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
