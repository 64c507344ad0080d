"""`make setup` on machines that lack something: one clear refusal that names it, before anything is made."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

TOOLS = ["bash", "cat", "cut", "dirname", "env", "flock", "grep", "head", "mkdir", "sed", "sort", "tail", "uname"]


@pytest.fixture
def machine(repository: Path, tmp_path: Path) -> Path:
    """A clone's folder with a `bin` that holds a few ordinary tools and a modern Rust, compiler and Python."""
    for name in ("scripts/setup.sh", "scripts/disk_space.sh", "Cargo.toml", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(repository / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found, tool
        (tmp_path / "bin" / tool).symlink_to(found)
    for name in ("cargo", "cc"):
        program(tmp_path, name, "exit 0")
    program(tmp_path, "df", "echo Avail; echo ' 99999M'")
    program(tmp_path, "rustc", "echo 'rustc 9.9.9 (a release from the future)'")
    # Stops the script where it would make the environment.
    program(
        tmp_path, "python3", 'case "$*" in *version_info*|*ensurepip*) exit 0;; esac; echo reached the end >&2; exit 7'
    )
    return tmp_path


def program(machine: Path, name: str, body: str) -> None:
    """Puts a shell program into the machine's `bin`."""
    path = machine / "bin" / name
    path.unlink(missing_ok=True)
    path.write_text(f"#!{shutil.which('bash')}\n{body}\n")
    path.chmod(0o755)


def setup(machine: Path, **environment: str) -> tuple[int, str]:
    """Runs the script; its status and everything it said."""
    environment = {"PATH": str(machine / "bin"), "HOME": str(machine), **environment}
    done = subprocess.run(
        [machine / "scripts" / "setup.sh"], env=environment, capture_output=True, text=True, check=False, timeout=30
    )
    return done.returncode, done.stdout + done.stderr


def remove(name: str) -> Callable[[Path], None]:
    return lambda machine: (machine / "bin" / name).unlink()


def replace(name: str, body: str) -> Callable[[Path], None]:
    return lambda machine: program(machine, name, body)


def test_a_complete_machine_gets_past_the_checks(machine: Path) -> None:
    status, said = setup(machine)
    assert (status, "reached the end" in said) == (7, True), said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (remove("cargo"), ["no Rust toolchain", "rustup"]),
        (remove("rustc"), ["no Rust toolchain", "rustup"]),
        (replace("rustc", "echo 'rustc 1.70.0 (old)'"), ["1.70.0 is too old", "or newer is needed", "rustup update"]),
        (remove("cc"), ["no C compiler", "build-essential"]),
        (remove("python3"), ["no Python 3.11 or newer"]),
        (
            replace("python3", 'if [ "$1" = --version ]; then echo "Python 3.8.10"; fi; exit 1'),
            ["no Python 3.11 or newer", "Python 3.8.10", "make PYTHON="],
        ),
        (
            replace("python3", 'case "$*" in *ensurepip*) exit 1;; esac'),
            ["cannot make virtual environments", "python3-venv"],
        ),
        (replace("uname", "echo Darwin"), ["rustvllm runs on Linux", "Darwin"]),
    ],
    ids=[
        "no cargo",
        "no rustc",
        "old rustc",
        "no C compiler",
        "no Python",
        "old Python",
        "no venv module",
        "not Linux",
    ],
)
def test_what_is_missing_is_named(machine: Path, change: Callable[[Path], None], words: list[str]) -> None:
    change(machine)
    status, said = setup(machine)
    assert status == 1, said
    assert "cannot continue" in said
    for word in words:
        assert word in said
    assert not (machine / ".venv").exists()


@pytest.mark.parametrize(("available", "status"), [(1999, 1), (2000, 0), (0, 1)])
def test_a_full_disk_is_refused_with_what_is_needed_and_free(machine: Path, available: int, status: int) -> None:
    program(machine, "df", f"echo Avail; echo ' {available}M'")
    done = subprocess.run(
        [machine / "scripts" / "disk_space.sh", "2000", "a whole run of CI"],
        env={"PATH": str(machine / "bin")},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == status, done.stderr
    words = f"a whole run of CI needs 2000 MB of free disk space, but {machine} has {available} MB"
    assert (words in done.stderr) == (status == 1), done.stderr


def test_an_environment_is_not_begun_on_a_full_disk(machine: Path) -> None:
    program(machine, "df", "echo Avail; echo ' 100M'")
    status, said = setup(machine)
    assert status == 1, said
    assert "the environment .venv needs 8000 MB of free disk space" in said
    assert "reached the end" not in said


def test_another_processor_is_warned_about_and_served(machine: Path) -> None:
    program(machine, "uname", '[ "$1" = -m ] && echo aarch64 || echo Linux')
    status, said = setup(machine)
    assert (status, "only x86-64 is tested" in said) == (7, True), said


def test_a_named_interpreter_is_the_one_asked(machine: Path) -> None:
    status, said = setup(machine, PYTHON="python9.9")
    assert status == 1
    assert "python9.9" in said


def test_a_broken_environment_is_not_silently_remade(machine: Path) -> None:
    (machine / ".venv" / "bin").mkdir(parents=True)
    broken = machine / ".venv" / "bin" / "python"
    broken.write_text(f"#!{shutil.which('bash')}\nexit 1\n")
    broken.chmod(0o755)
    status, said = setup(machine)
    assert status == 1
    assert "rm -r .venv" in said
    assert os.access(broken, os.X_OK)
