"""``rustvllm bench kernels`` on the CPU: what it says of each contender, and what it refuses."""

import json

import pytest

from rustvllm.cli.bench import kernel_bench
from rustvllm.cli.bench.report.output import check_output
from rustvllm.cli.main import main

TINY = kernel_bench.ModelShape(32, 64, 4, 2, 8, 100)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(kernel_bench.SHAPES, "gpt2", TINY)
    monkeypatch.setattr(kernel_bench, "STEPS", {"decode": ((2, 20, 1),), "prefill": ((1, 40, 24),)})
    monkeypatch.setattr(kernel_bench, "num_compute_threads", lambda: 1)


def test_every_contender_is_timed(capsys, tmp_path):
    path = tmp_path / "report.json"
    argv = ["--device", "cpu", "--num-rounds", "2", "--output-json", str(path)]
    assert main(["bench", "kernels", *argv, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert json.loads(path.read_text()) == report
    assert min(report["ruler"].values()) > 0
    of_kernel = {}
    for line in report["results"]:
        assert line["ms"] > 0
        of_kernel.setdefault(line["kernel"], []).append(line)
    assert {line["contender"] for line in of_kernel["attention"]} == {"torch", "cpu"}
    assert {line["contender"] for line in of_kernel["linear"]} >= {"torch", "core", "core int8", "core w8a8"}
    assert {line["case"] for line in of_kernel["linear"]} == {"qkv", "out", "up", "down", "head"}
    assert {line["contender"] for line in of_kernel["sampler"]} == {"greedy", "temperature", "top_k 50", "top_p 0.9"}
    prefill = next(line for line in of_kernel["attention"] if line["case"] == "prefill")
    # 24 queries see 16 cached tokens each and 1 + 2 + … + 24 of their own; 2 operations for each of 2 products.
    assert prefill["GFLOP/s"] * prefill["ms"] == pytest.approx(4 * (24 * 16 + 300) * 4 * 8 / 1e6)
    head = next(line for line in of_kernel["linear"] if line["case"] == "head" and line["contender"] == "torch")
    assert head["GB/s"] * head["ms"] == pytest.approx(100 * 32 * 4 / 1e6)


def test_one_kernel_for_people(capsys):
    assert main(["bench", "kernels", "--device", "cpu", "--num-rounds", "1", "--kernels", "sampler"]) == 0
    out = capsys.readouterr().out
    assert "gpt2 in float32 on cpu, 1 threads" in out
    assert "greedy" in out
    assert "qkv" not in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--device", "cuda"], "needs a GPU, but this machine has none that can be used"),
        (["--output-json", "/no/such/folder/file"], "cannot write --output-json"),
        (["--num-rounds", "0"], "0"),
        (["--shape", "gpt9"], "gpt9"),
        (["--kernels", "sampler", "--nonsense"], "nonsense"),
    ],
)
def test_what_is_refused(capsys, monkeypatch, argv, message):
    monkeypatch.setattr("rustvllm.config.devices.visible_gpus", list)
    try:
        code = main(["bench", "kernels", *argv])
    except SystemExit as error:
        code = error.code
    assert code != 0
    assert message in capsys.readouterr().err


def test_the_check_of_an_output_leaves_no_file_behind(tmp_path):
    check_output(str(tmp_path / "new"))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "old")
    for name in ("old", "link"):
        check_output(str(tmp_path / name))
        assert (tmp_path / name).read_text() == "kept"
