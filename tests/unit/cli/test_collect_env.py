"""``rustvllm collect-env``: what a report has, and that no secret is in it."""

import json
import os
import subprocess
import sys

import rustvllm
from rustvllm.cli.main import main


def test_versions_machine_and_settings(capsys, monkeypatch):
    monkeypatch.setenv("RUSTVLLM_API_KEY", "sesame")
    monkeypatch.setenv("RUSTVLLM_ENGINE_SECRET", "sesame")
    monkeypatch.setenv("RUSTVLLM_MAX_N", "7")
    monkeypatch.setenv("UNRELATED", "sesame")
    assert main(["collect-env", "--json"]) == 0
    text = capsys.readouterr().out
    assert "sesame" not in text
    facts = json.loads(text)
    assert facts["rustvllm"]["version"] == rustvllm.__version__
    assert facts["packages"]["torch"] != "not installed"
    assert facts["machine"]["cores"] >= 1
    assert facts["devices"]["chosen"] in {"cpu", "cuda"}
    assert facts["environment"]["RUSTVLLM_MAX_N"] == "7"
    assert facts["environment"]["RUSTVLLM_API_KEY"] == "(set)"
    assert "UNRELATED" not in facts["environment"]
    assert main(["collect-env"]) == 0
    assert f"version: {rustvllm.__version__}" in capsys.readouterr().out


def test_a_package_that_is_missing_and_a_tool_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr("rustvllm.cli.collect_env.PACKAGES", ("no-such-package",))
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["collect-env"]) == 0
    out = capsys.readouterr().out
    assert "no-such-package: not installed" in out
    assert "nvidia-smi is not there" in out


def test_wrong_variables_are_reported_and_stop_nothing():
    wrong = {"RUSTVLLM_LOGGING_LEVEL": "loud", "RUSTVLLM_MAX_N": "many", "RUSTVLLM_MAX_NN": "1"}
    command = [sys.executable, "-m", "rustvllm.cli.main", "collect-env", "--json"]
    done = subprocess.run(command, env=os.environ | wrong, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0
    assert done.stderr == (
        "rustvllm collect-env: warning: environment variable RUSTVLLM_MAX_NN is not known; did you mean "
        "RUSTVLLM_MAX_N?\n"
    )
    facts = json.loads(done.stdout)
    assert facts["environment"].items() >= wrong.items()
    assert facts["problems"].keys() == {"RUSTVLLM_LOGGING_LEVEL", "RUSTVLLM_MAX_N"}
    assert "must be a number from 1 to 1048576, got 'many'" in facts["problems"]["RUSTVLLM_MAX_N"]


def test_the_environment_is_afterwards_what_it_was(capsys, monkeypatch):
    monkeypatch.setenv("RUSTVLLM_MAX_N", "many")
    assert main(["collect-env"]) == 0
    assert "problems:\n  RUSTVLLM_MAX_N: environment variable RUSTVLLM_MAX_N must be" in capsys.readouterr().out
    assert os.environ["RUSTVLLM_MAX_N"] == "many"
    assert main(["inspect", "x"]) == 1
