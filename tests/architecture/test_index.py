"""docs/README.md names every page, so that none is found by accident only."""

import re
from pathlib import Path


def test_every_page_is_in_the_index(repository: Path) -> None:
    docs = repository / "docs"
    text = (docs / "README.md").read_text(encoding="utf-8")
    pages = {str(path.relative_to(docs)) for path in docs.rglob("*.md")} - {"README.md"}
    assert len(pages) >= 12
    assert pages - set(re.findall(r"\]\(([^)#]+)", text)) == set()
