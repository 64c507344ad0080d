"""docs/flags.md is what the program declares."""

import subprocess
import sys
from pathlib import Path

from rustvllm.cli.grouped_help import groups
from rustvllm.cli.serve import make_parser


def test_the_page_of_flags_is_current(repository: Path) -> None:
    script = [sys.executable, "scripts/flags_doc.py", "--check"]
    done = subprocess.run(script, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_page_has_every_flag_once(repository: Path) -> None:
    page = (repository / "docs" / "flags.md").read_text(encoding="utf-8")
    flags = [flag for _, actions in groups(make_parser()) for action in actions for flag in action.option_strings]
    assert len(flags) > 90
    assert [flag for flag in flags if page.count(f"| `{flag}`") + page.count(f"` `{flag}`") != 1] == []
