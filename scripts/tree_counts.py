"""Counts what the Python package is made of, here and in other commits: the figures of docs/architecture.md.

    scripts/tree_counts.py                  the working tree
    scripts/tree_counts.py ab24904 HEAD     these commits, then the working tree

A line of code is one with a token that is neither a comment nor a docstring. Prints a JSON object for each tree.
"""

import argparse
import ast
import io
import json
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = "python/rustvllm"
MAX_LINES = 600
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def sources(commit: str | None) -> Iterator[tuple[str, str]]:
    """Paths below the package, and texts, of its modules in a commit; None: in the working tree."""
    if commit is None:
        for path in sorted((REPOSITORY / PACKAGE).rglob("*.py")):
            yield str(path.relative_to(REPOSITORY / PACKAGE)), path.read_text(encoding="utf-8")
        return
    for path in _git("ls-tree", "-r", "--name-only", commit, "--", PACKAGE).splitlines():
        if path.endswith(".py"):
            yield path.removeprefix(f"{PACKAGE}/"), _git("show", f"{commit}:{path}")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout


def code_lines(text: str) -> int:
    """Lines with code: blank ones, comments and docstrings are none."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        # A text that stands alone is a docstring of what is before it, too.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def imported_rooms(text: str) -> set[str]:
    """First names below ``rustvllm`` of all modules that a module imports."""
    rooms = set()
    for node in ast.walk(ast.parse(text)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name}" for name in names] if node.level == 0 else []
        rooms.update(name.split(".")[1] for name in names if name.startswith("rustvllm."))
    return rooms


def counts(commit: str | None) -> dict[str, object]:
    """The figures of one tree."""
    texts = dict(sources(commit))
    assert texts, f"{PACKAGE} has no module in {commit}"
    modules = {path: text for path, text in texts.items() if not path.endswith("__init__.py")}
    folders = Counter(path.rpartition("/")[0] for path in modules)
    packages = {path.split("/")[0] for path in texts if "/" in path}
    edges = {
        (path.split("/")[0], room)
        for path, text in texts.items()
        if "/" in path
        for room in imported_rooms(text) & packages
        if room != path.split("/")[0]
    }
    largest, size = max(folders.items(), key=lambda item: (item[1], item[0]))
    lines = [text.count("\n") for text in texts.values()]
    return {
        "commit": commit or "working tree",
        "modules": len(modules),
        "folders": len(folders),
        "largest_folder": {"name": largest, "modules": size},
        "top_level_modules": folders[""],
        "lines": sum(lines),
        "lines_of_code": sum(map(code_lines, texts.values())),
        "files_over_600_lines": sum(count > MAX_LINES for count in lines),
        "packages": len(packages),
        "imports_between_packages": len(edges),
        "packages_that_import_each_other": sorted(
            f"{one} <-> {other}" for one, other in edges if one < other and (other, one) in edges
        ),
    }


def main() -> None:
    """Print the counts of the trees."""
    parser = argparse.ArgumentParser(description="Count the modules, folders and lines of the Python package.")
    parser.add_argument("commits", nargs="*", help="commits to count before the working tree")
    for commit in [*parser.parse_args().commits, None]:
        print(json.dumps(counts(commit), indent=2))


if __name__ == "__main__":
    main()
