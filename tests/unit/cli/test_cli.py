"""The command line's own part: commands, flags that mean the same, the positional model, messages and exit codes."""

import os
import subprocess
import sys

import pytest

import rustvllm
from rustvllm.cli.main import COMMANDS, main
from rustvllm.cli.serve import parse_args
from rustvllm.config.engine_args import AsyncEngineArgs


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in COMMANDS)
    assert main([]) == 2


@pytest.mark.parametrize("flag", ["--version", "-v"])
def test_version(capsys, flag):
    assert main([flag]) == 0
    assert capsys.readouterr().out.strip() == rustvllm.__version__


@pytest.mark.parametrize(("code", "left"), [(130, [130]), (1, []), (0, [])])
def test_an_interrupted_trace_does_not_wait_for_the_interpreter(monkeypatch, code, left):
    leaves = []
    monkeypatch.setattr("rustvllm.cli.trace.trace", lambda _: code)
    monkeypatch.setattr("rustvllm.cli.main.leave", leaves.append)
    monkeypatch.setattr("sys.argv", ["rustvllm", "trace", "x"])
    assert main() == code
    assert leaves == left
    assert main(["trace", "x"]) == code, "called from Python it comes back"
    assert leaves == left


def test_a_trace_that_is_interrupted_while_it_imports_says_nothing(monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("rustvllm.cli.trace.trace", interrupted)
    assert main(["trace", "x"]) == 130


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "command", ["--version", "--help", "serve --help=all", "trace a --max-tokens 1 --executor sim"]
)
def test_output_without_a_reader_ends_a_command_as_sigpipe_would(command, unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "rustvllm.cli.main", *command.split()], stdout=writer, stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered}, timeout=120, check=False,
    )  # fmt: skip
    os.close(writer)
    assert done.returncode == 141
    assert b"Error" not in done.stderr


@pytest.mark.parametrize("command", ["serve", "trace", "run-batch", "bench"])
def test_a_working_folder_that_was_removed_is_named(tmp_path, command):
    gone = tmp_path / "gone"
    program = f'mkdir {gone}; cd {gone}; rmdir {gone}; exec "{sys.executable}" -m rustvllm.cli.main {command}'
    done = subprocess.run(["/bin/sh", "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"rustvllm {command}: error: the working folder has been removed; change to a folder that exists (cd)"
    )


def test_a_system_without_proc_is_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("rustvllm.cli.main._MEMORY", tmp_path / "meminfo")
    assert main(["serve"]) == 1
    assert "serve: error: there is no /" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MAX_N", "0", "must be a number from 1 to 1048576, got '0'"),
        ("HUB_TIMEOUT", "soon", "must be a number from 0.1 to 600, got 'soon'"),
        ("ENGINE_READY_TIMEOUT", "-1", "must be a number from 0.1 to 86400, got '-1'"),
        ("TRACE", "ture", "must be 1 or 0, got 'ture'"),
        ("CHECK_INVARIANTS", "2", "must be 1 or 0, got '2'"),
        ("DECODER", "x", "must be one of core, modules, got 'x'"),
        ("CACHE", "~stranger/x", "is '~stranger/x', which cannot be used as a path"),
        ("LOGGING_CONFIG_PATH", "~stranger/x", "is '~stranger/x', which cannot be used as a path"),
    ],
)
def test_a_wrong_environment_variable_is_named_before_anything_starts(monkeypatch, capsys, name, value, message):
    monkeypatch.setenv(f"RUSTVLLM_{name}", value)
    assert main(["bench"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"rustvllm bench: error: environment variable RUSTVLLM_{name} {message}")


def test_a_misspelt_environment_variable_is_named_and_those_of_kubernetes_are_not(monkeypatch, capsys):
    for name in ("PORT", "SERVICE_HOST", "SERVICE_PORT", "PORT_8000_TCP", "PORT_8000_TCP_ADDR"):
        monkeypatch.setenv(f"RUSTVLLM_{name}", "tcp://10.0.0.1:8000")
    main(["bench"])
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RUSTVLLM_LOGING_LEVEL", "DEBUG")
    main(["bench"])
    assert capsys.readouterr().err == (
        "rustvllm bench: warning: environment variable RUSTVLLM_LOGING_LEVEL is not known; did you mean "
        "RUSTVLLM_LOGGING_LEVEL?\n"
    )


def test_unknown_commands(capsys):
    assert main(["sreve"]) == 2
    assert "unknown command 'sreve'; did you mean 'serve'? Commands are serve, chat, " in capsys.readouterr().err


def test_serve_help_lists_engine_and_server_flags(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--help=all"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--max-model-len", "--port", "--api-key", "--no-enable-prefix-caching", "--num-gpu-blocks-override"):
        assert flag in text
    groups = {name: text.split(f"\n{name}:\n")[1].split("\n\n")[0] for name in ("cache", "scheduler")}
    assert "--swap-space" in groups["cache"]
    assert "--prefix-caching-hash-algo" in groups["cache"]
    for flag in ("preemption-mode", "preemption-immunity-steps", "max-look-past", "max-times-passed", "watermark"):
        assert f"--{flag}" in groups["scheduler"]
    assert "--max_model_len" not in text
    assert "--cpu-offload-gb" not in text  # not before it works


def test_flags_reach_engine_and_server():
    args = parse_args(
        ["m", "--max_model_len", "2K", "--port=9000", "--api_key", "a", "b", "--no_enable_prefix_caching"]
    )
    engine = AsyncEngineArgs.from_cli_args(args)
    assert (engine.model, engine.max_model_len, engine.enable_prefix_caching) == ("m", 2048, False)
    assert (args.port, args.api_key) == (9000, ["a", "b"])


def test_no_model_is_the_embedded_one():
    assert AsyncEngineArgs.from_cli_args(parse_args([])).model is None
    assert AsyncEngineArgs.from_cli_args(parse_args(["--model", "m"])).model == "m"


def test_the_positional_model_wins_with_a_warning(capsys):
    assert AsyncEngineArgs.from_cli_args(parse_args(["a", "--model", "b"])).model == "a"
    assert "serving a, given by position; --model b is ignored" in capsys.readouterr().err
    parse_args(["a", "--model", "a"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["m", "--max-modle-len", "5"], "unknown argument --max-modle-len 5; did you mean --max-model-len?"),
        (["m", "extra"], "unknown argument extra"),
        (["m", "--max-model"], "unknown argument --max-model; did you mean --max-model-len?"),
        (["m", "--port", "99999"], "0 to 65535"),
        (["m", "--max-num-seqs", "many"], "must be a whole number"),
        (["m", "--cpu-offload-gb", "2"], "--cpu-offload-gb 2 is not supported yet"),
        (["m", "--default-mm-loras", "a=b"], "--default-mm-loras a=b is not supported yet: adapters"),
        (["m", "--api-server-count", "65"], "whole number up to 64"),
        (["m", "-dp", "x"], "whole number up to 64"),
    ],
)
def test_wrong_usage(capsys, argv, message):
    with pytest.raises(SystemExit) as caught:
        parse_args(argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--api-kye", "hush"], ["--api_kyes=hush"], ["--my-token", "hush", "m"]])
def test_no_key_is_in_the_error_over_a_misspelt_flag(capsys, argv):
    with pytest.raises(SystemExit):
        parse_args(argv)
    text = capsys.readouterr().err
    assert "unknown argument --" in text
    assert "hush" not in text
