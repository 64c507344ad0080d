"""``rustvllm collect-env``: what a report has, and that no secret is in it."""

import json

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
