"""A server that loses a rank at a random moment: its clients know which, and nothing is left.

The work is done by ``benches/python/killed_ranks.py``, whose rounds these are.
"""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def run(repository: Path, *arguments: str, seconds: float) -> dict[str, Any]:
    seed = random.SystemRandom().randrange(10_000)
    command = [sys.executable, str(repository / "benches/python/killed_ranks.py"), "--seed", str(seed), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    assert result.returncode == 0, f"seed {seed}\n{result.stdout}\n{result.stderr}"
    report = json.loads(result.stdout)
    assert report["failed"] == []
    assert report["gone_s"]["max"] > 0
    return report


def test_clients_hear_of_a_killed_rank_by_name(repository: Path) -> None:
    run(repository, "--rounds", "1", "--moments", "steps", seconds=110)


@pytest.mark.slow
def test_an_engine_that_is_started_again_starts_ranks_of_its_own_and_serves(repository: Path) -> None:
    report = run(repository, "--rounds", "2", "--moments", "restart", seconds=170)
    assert report["back_s"]["max"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["steps", "restart"])
def test_a_stage_that_is_killed_is_named_and_comes_back(repository: Path, moment: str) -> None:
    run(repository, "--rounds", "2", "--stages", "2", "--moments", moment, seconds=170)


@pytest.mark.slow
def test_ranks_that_are_killed_while_they_start_leave_nothing(repository: Path) -> None:
    run(repository, "--rounds", "2", "--moments", "start", seconds=110)
