"""What `make` gives to everything that it starts, and how it runs things at the same time."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

SHOW = "show:\n\t@$(SHOWN_PYTHON) -c 'import sys; print(sys.dont_write_bytecode)'\n"


def test_python_keeps_its_bytecode_whatever_the_environment_says(repository: Path) -> None:
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "SHOWN_PYTHON": sys.executable}
    command = ["make", "-f", "Makefile", "-f", "-", "show"]
    done = subprocess.run(
        command, input=SHOW, cwd=repository, env=environment, capture_output=True, text=True, check=False, timeout=30
    )
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


@pytest.mark.parametrize(
    ("front", "behind", "status"),
    [("true", "true", 0), ("false", "true", 1), ("true", "exit 3", 1), ("exit 2", "false", 1)],
)
def test_commands_side_by_side_fail_when_one_of_them_does(
    repository: Path, tmp_path: Path, front: str, behind: str, status: int
) -> None:
    """Each waits for the other to begin, so that neither can run before the other has ended."""
    wait = "until [ -e {} ]; do sleep 0.01; done"
    first = f"touch {tmp_path}/front; {wait.format(tmp_path / 'behind')}; echo in front; {front}"
    second = f"touch {tmp_path}/behind; {wait.format(tmp_path / 'front')}; echo behind; {behind}"
    command = [repository / "scripts" / "side_by_side.sh", first, second]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stderr) == (status, "")
    assert done.stdout == f"in front\n--- {second}\nbehind\n"


def test_what_runs_behind_ends_with_what_is_in_front(repository: Path, tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    command = [repository / "scripts" / "side_by_side.sh", "sleep 60", f"echo $$ >{marker}; sleep 60; true"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        while not (marker.exists() and marker.read_text()):
            time.sleep(0.01)
        behind = psutil.Process(int(marker.read_text()))
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(30) != 0
    behind.wait(30)
