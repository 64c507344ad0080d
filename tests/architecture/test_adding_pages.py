"""The lists of files in docs/adding-a-*.md are the files that name a parameter or flag of that kind today."""

import re
import subprocess
from pathlib import Path

import pytest

# Files that are edited for a new one without naming it.
UNNAMED = {"crates/ipc/src/handshake.rs", "python/rustvllm/sample/token_rules.py"}


@pytest.mark.parametrize(
    ("page", "begin", "count", "name"),
    [
        ("adding-a-sampling-parameter.md", "A number needs 8", 8, "top_n_sigma"),
        ("adding-a-sampling-parameter.md", "A list needs 8", 8, "bad_words"),
        ("adding-a-flag.md", "A flag of the scheduler needs 8", 8, "max_look_past"),
    ],
)
def test_the_files_edited_by_hand_are_listed(repository: Path, page: str, begin: str, count: int, name: str) -> None:
    text = (repository / "docs" / page).read_text(encoding="utf-8")
    _, found, rest = text.partition(begin)
    assert found, "the list has another beginning"
    items = rest.partition("\n\n- ")[2].partition("\n\n")[0]
    listed, folder = [], ""
    for path in re.findall(r"`([\w./-]+\.(?:rs|pyi?))`", items):
        folder = path.rpartition("/")[0] or folder
        listed.append(path if "/" in path else f"{folder}/{path}")
    command = ["git", "grep", "-lw", name, "--", ":(glob)crates/*/src/**", "python"]
    naming = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True).stdout.split()
    assert set(listed) - UNNAMED == set(naming)
    assert len(listed) == len(set(listed)) == count
