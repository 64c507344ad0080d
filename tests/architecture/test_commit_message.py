"""The rules for commit messages: what the hook takes and what it refuses."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def checker(repository: Path):
    spec = importlib.util.spec_from_file_location("checker", repository / "scripts" / "check_commit_message.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("message", "num_lines"),
    [
        ("Refuse a second Host header", 10),
        ("Refuse a second Host header\n\nIt chose the key of another tenant.\n", 5000),
        ("Process answers in the order of their steps\n# Please enter the commit message\n", 200),
        ("Embed the tokenizer", 3),
        ("Add `/tmp` to the places for sockets", 3),
    ],
)
def test_good_messages(checker, message, num_lines):
    assert checker.faults(message, num_lines) == []


@pytest.mark.parametrize(
    ("message", "num_lines", "says"),
    [
        ("", 1, "the message is empty"),
        ("# only a comment", 1, "the message is empty"),
        ("Refuse " + "x" * 66, 1, "the subject has 73 characters"),
        ("Merge branch 'main' of elsewhere", 1, "names a folder or a merge"),
        ("Take what lies in /tmp/a-work", 1, "names a folder or a merge"),
        ("refuse a second Host header", 1, "capital letter"),
        ("Refuse a second Host header.", 1, "full stop"),
        ("Refused a second Host header", 1, "imperative"),
        ("Refusing a second Host header", 1, "imperative"),
        ("Refuses a second Host header", 1, "imperative"),
        ("Refuse a header\nat once", 1, "line after the subject"),
        ("Refuse a second Host header", 201, "the change has 201 lines"),
        ("Refuse a second Host header\n\n# no body\n", 201, "the change has 201 lines"),
    ],
)
def test_bad_messages(checker, message, num_lines, says):
    assert any(says in fault for fault in checker.faults(message, num_lines))


def test_the_hook_stops_a_commit(repository: Path, tmp_path: Path):
    environment = {**os.environ, "HOME": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for name in ("AUTHOR", "COMMITTER"):
        environment |= {f"GIT_{name}_NAME": "a", f"GIT_{name}_EMAIL": "a@example.org"}

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["git", *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=60
        )

    assert git("init", "-q").returncode == 0
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "check_commit_message.py").write_bytes(
        (repository / "scripts" / "check_commit_message.py").read_bytes()
    )
    git("config", "core.hooksPath", str(repository / "scripts" / "hooks"))
    (tmp_path / "long.txt").write_text("line\n" * 300)
    git("add", "long.txt")
    refused = git("commit", "-m", "Add a long file")
    assert refused.returncode != 0
    assert "the change has 300 lines" in refused.stderr
    assert git("commit", "-m", "Add a long file", "-m", "It is needed.").returncode == 0
    assert git("log", "--format=%s").stdout == "Add a long file\n"
