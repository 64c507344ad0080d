"""The acceptance for a GPU runs on the CPU, with tiny shapes, so that what it calls is there when a GPU is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benches" / "python" / "gpu_accept.py"
SECTIONS = {
    "kernels", "greedy", "sampling", "features", "capture_ahead", "capture_late", "capture_measured", "capture_broken",
    "toolchain", "perf", "micro",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_section_runs_and_every_check_is_right(tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, SCRIPT, "--dry-run", "--output-json", report, "--budget", "560"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=590, env=os.environ, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(report.read_text())
    assert found["ok"]
    assert set(found["sections"]) == SECTIONS
    for name, section in found["sections"].items():
        assert section["status"] == "ran", name
        assert section["checks"], name
        assert all(check["ok"] for check in section["checks"].values()), name


@pytest.mark.slow
def test_a_section_without_time_is_said_to_be_skipped(tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, SCRIPT, "--dry-run", "--output-json", report, "--budget", "1", "--sections", "micro"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 1
    assert json.loads(report.read_text())["sections"]["micro"]["status"] == "skipped, no time was left"
