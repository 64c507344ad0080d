"""Rules for the source files themselves: their length, their first lines, and words that do not belong in them."""

import ast
import re
from pathlib import Path

import pytest

MAX_LINES = 600
SOURCES = {".py", ".pyi", ".rs", ".sh"}
# Paths of a developer's machine, and marks of unfinished work.
MACHINE_PATH = r"(?<![\w.])/(?:work|root|home(?!/(?:user|you)\b))/"
FORBIDDEN = re.compile(MACHINE_PATH + r"|\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")


@pytest.fixture(scope="module")
def sources(tracked_files: list[Path]) -> list[Path]:
    found = [path for path in tracked_files if path.suffix in SOURCES]
    assert {path.suffix for path in found} == SOURCES
    assert len(found) >= 40
    return found


def test_no_file_is_longer_than_the_limit(sources: list[Path], repository: Path) -> None:
    lines = {str(path.relative_to(repository)): len(path.read_text(encoding="utf-8").splitlines()) for path in sources}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def test_every_module_says_what_it_is_for(sources: list[Path], repository: Path) -> None:
    silent = []
    for path in sources:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".rs" and path.parent.name == "src":
            if not re.search(r"^//!", text, re.MULTILINE):
                silent.append(path)
        elif path.suffix == ".py" and text.strip() and ast.get_docstring(ast.parse(text)) is None:
            silent.append(path)
    assert [str(path.relative_to(repository)) for path in silent] == []


def test_no_forbidden_words(tracked_files: list[Path], repository: Path) -> None:
    assert FORBIDDEN.search("see /ho" + "me/me/x")
    assert FORBIDDEN.search("# FIX" + "ME: later")
    assert not FORBIDDEN.search("http://host/v1/work/")
    found = []
    for path in tracked_files:
        if path.suffix in SOURCES | {".md", ".toml", ".yaml", ".yml", ""} and path.name != "LICENSE":
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if FORBIDDEN.search(line):
                    found.append(f"{path.relative_to(repository)}:{number}: {line.strip()}")
    assert found == []


def test_no_large_file_slips_in(tracked_files: list[Path], repository: Path) -> None:
    """The embedded model is the one large thing here, and it is bounded too."""
    sizes = {str(path.relative_to(repository)): path.stat().st_size for path in tracked_files}
    large = {name: size for name, size in sizes.items() if size > 500_000}
    assert all(name.startswith("python/rustvllm/assets/") and size <= 10_000_000 for name, size in large.items()), large
