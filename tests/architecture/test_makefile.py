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


FAILS_UNTIL_ITS_MARK_IS_THERE = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range({count}))
def test_a_wait_that_is_too_short(number):
    mark = Path(__file__).with_name(f"mark-{{number}}")
    was_there = mark.exists()
    mark.touch()
    assert was_there

def test_right(): pass
"""


def _rerun_alone(repository: Path, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PASSED_ALONE": str(folder / "named"), "PYTHONDONTWRITEBYTECODE": "1"}
    script = [sys.executable, repository / "scripts" / "rerun_alone.py", *command]
    return subprocess.run(script, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=100)


@pytest.mark.parametrize(
    ("count", "again", "status"), [(0, "", 0), (2, "", 0), (2, "rm -f mark-1", 1), (5, "", 1)], ids=str
)
def test_python_tests_that_pass_alone_are_named(
    repository: Path, tmp_path: Path, count: int, again: str, status: int
) -> None:
    """All pass at once; two pass alone; one of them fails alone too; five are too many to be the machine's fault."""
    test = FAILS_UNTIL_ITS_MARK_IS_THERE.format(count=count)
    if again:
        test += f"\nimport subprocess\nsubprocess.run({again!r}, shell=True, cwd=Path(__file__).parent)\n"
    (tmp_path / "test_waits.py").write_text(test)
    pytest_ = (sys.executable, "-m", "pytest", "-p", "no:randomly", "--numprocesses", "2", "--dist", "worksteal")
    done = _rerun_alone(repository, tmp_path, *pytest_, "test_waits.py")
    assert done.returncode == status, done.stdout + done.stderr
    assert done.stdout.count("short test summary info") == (2 if count == 2 and again else 1 if count else 0)
    named = tmp_path / "named"
    if count == 2 and not again:
        names = [f"test_waits.py::test_a_wait_that_is_too_short[{number}]" for number in range(2)]
        assert named.read_text() == "".join(f"  passes alone, failed with others: {name}\n" for name in names)
        assert named.read_text() in done.stdout
    else:
        assert not named.exists()
    assert ("5 failed: more than the 4 that are run again" in done.stdout) == (count == 5)


@pytest.mark.parametrize(
    ("last_words", "alone", "status", "calls"),
    [
        ("", "exit 0", 0, 1),
        ("error: 2 targets failed:\n    `-p ipc --test serving`\n    `-p kvblocks --lib`\n", "exit 0", 0, 3),
        ("error: 1 target failed:\n    `-p ipc --test serving`\n", "exit 101", 101, 2),
        ("error: could not compile `ipc`\n", "exit 0", 101, 1),
        ("error: 5 targets failed:\n" + "    `-p ipc --lib`\n" * 5, "exit 0", 101, 1),
    ],
    ids=["all pass", "two pass alone", "one fails alone", "nothing was run", "too many failed"],
)
def test_rust_tests_that_pass_alone_are_named(
    repository: Path, tmp_path: Path, last_words: str, alone: str, status: int, calls: int
) -> None:
    """A stand-in of cargo, which writes its calls down and ends as cargo does."""
    cargo = tmp_path / "cargo"
    (tmp_path / "words").write_text(last_words)
    cargo.write_text(
        f"""#!/usr/bin/env bash
        echo "$*" >>{tmp_path}/calls
        case $* in *--test-threads=1) {alone} ;; esac
        cat {tmp_path}/words >&2
        [ ! -s {tmp_path}/words ] || exit 101
        """
    )
    cargo.chmod(0o755)
    done = _rerun_alone(repository, tmp_path, str(cargo), "test", "--quiet")
    assert done.returncode == status, done.stdout + done.stderr
    assert done.stderr == last_words
    written = (tmp_path / "calls").read_text().splitlines()
    assert len(written) == calls
    assert written[0] == "test --quiet --no-fail-fast"
    if calls > 1:
        assert written[1] == "test --quiet -p ipc --test serving -- --test-threads=1"
    assert (tmp_path / "named").exists() == (calls > 1 and status == 0)
