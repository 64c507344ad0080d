"""The matrix of features that meet names tests; they exist."""

import ast
import re
from pathlib import Path


def test_every_test_that_the_matrix_names_exists(repository: Path) -> None:
    page = (repository / "docs" / "compatibility.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:tests|crates)/[\w/.-]+\.(?:py|rs))(?:::(\w+))?`", page)
    assert len(named) >= 30
    missing = []
    for path, function in named:
        source = repository / path
        if not source.is_file():
            missing.append(path)
        elif function:
            tree = ast.parse(source.read_text(encoding="utf-8"))
            if function not in {
                node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            }:
                missing.append(f"{path}::{function}")
    assert missing == []


def test_each_cell_says_whether_it_works(repository: Path) -> None:
    page = (repository / "docs" / "compatibility.md").read_text(encoding="utf-8")
    matrix = page.split("## What there is not")[0]
    rows = [line for line in matrix.splitlines() if line.startswith("| ") and not line.startswith("| |")]
    assert len(rows) >= 10
    verdicts = ("works", "refused", "independent of it", "looked up nowhere", "mixed steps run without")
    for row in rows:
        name, *cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 6, name
        assert all(cell.startswith(verdicts) for cell in cells), name
