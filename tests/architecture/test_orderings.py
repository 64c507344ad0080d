"""Every atomic ordering above Relaxed has a comment with its reason, and its file a row in docs/concurrency.md."""

import re
from pathlib import Path

import pytest

STRONG = re.compile(r"Ordering::(Acquire|Release|AcqRel|SeqCst)\b")
REACH = 8  # lines above in which the comment may begin


@pytest.fixture(scope="module")
def strong_uses(repository: Path) -> list[tuple[Path, int, list[str]]]:
    """File, line number and the lines up to it, for every use outside test code."""
    uses = []
    for path in sorted(repository.glob("crates/*/src/**/*.rs")):
        code = path.read_text(encoding="utf-8").split("#[cfg(test)]\nmod tests")[0]
        lines = code.splitlines()
        for index, line in enumerate(lines):
            if STRONG.search(line) and not line.lstrip().startswith("//"):
                uses.append((path, index + 1, lines[max(0, index - REACH) : index + 1]))
    assert len(uses) >= 10, "the atomics have moved"
    return uses


def test_every_strong_ordering_has_its_reason(strong_uses: list[tuple[Path, int, list[str]]]) -> None:
    silent = []
    for path, number, lines in strong_uses:
        found = STRONG.search(lines[-1])
        assert found
        comments = " ".join(line.split("//", 1)[1] for line in lines if "//" in line)
        if not re.search(rf"\b{found[1]}\b", comments):
            silent.append(f"{path.name}:{number}: {lines[-1].strip()}")
    assert silent == []


def test_every_file_with_a_strong_ordering_is_written_down(
    strong_uses: list[tuple[Path, int, list[str]]], repository: Path
) -> None:
    text = (repository / "docs" / "concurrency.md").read_text(encoding="utf-8")
    files = {str(path.relative_to(repository)) for path, _, _ in strong_uses}
    assert {name for name in files if name not in text} == set()
