"""``rustvllm bench``: its measurements, mistakes and exit codes."""

import pytest

from rustvllm import _core
from rustvllm.cli.bench.main import COMMANDS
from rustvllm.cli.main import main


def test_help_names_every_measurement(capsys):
    assert main(["bench", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in COMMANDS)
    assert main(["bench"]) == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_every_measurement_explains_itself(capsys, command):
    with pytest.raises(SystemExit) as caught:
        main(["bench", command, "--help"])
    assert caught.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_an_unknown_measurement(capsys):
    assert main(["bench", "stpe"]) == 2
    assert f"no measurement 'stpe'; measurements are {', '.join(COMMANDS)}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["step", "--num-running", "1", "--steps", "1"],
        ["trace", "/no/such/file"],
        ["serve"],
        ["latency"],
        ["throughput"],
        ["startup"],
        ["kernels"],
    ],
)
def test_a_debug_build_is_refused(capsys, monkeypatch, argv):
    monkeypatch.setattr(_core, "build_profile", "debug")
    assert main(["bench", *argv]) == 1
    captured = capsys.readouterr()
    assert "the core is a debug build, whose times are meaningless; make a release build" in captured.err
    assert captured.out == ""


def test_ctrl_c_ends_without_a_traceback(capsys, monkeypatch):
    def interrupt(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(_core, "bench_trace", interrupt)
    assert main(["bench", "trace", "file"]) == 130
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""
