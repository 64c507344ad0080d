#!/usr/bin/env python3
"""Holds docstrings to one dialect: entries of `Args:`, `Attributes:`, `Raises:`, `Returns:`, `Yields:` have a capital.

python scripts/docstrings.py          # fail, with places, where an entry begins with a small letter
python scripts/docstrings.py --fix    # give those entries a capital

ruff's pydocstyle rules hold the rest of Google's style. An entry may begin with code, or with the name of a type.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCES = REPOSITORY / "python" / "rustvllm"
SECTION = re.compile(r"(\s*)(Args|Attributes|Raises|Returns|Yields):")
NAMED = re.compile(r"\s+\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*: (?=\S)")
TYPE_OR_CODE = re.compile(
    r"(?:u?int\d*|b?float\d*|bool|bytes|str|fp8|e4m3|numpy|torch|jinja2|uvloop|uvicorn|transformers|ns)\b|\w+[_.(=\[]"
)


def docstrings(source: str) -> Iterator[tuple[int, int]]:
    """First and last line, from 0, of each docstring of a module and of what is in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and first.end_lineno:
                yield first.lineno - 1, first.end_lineno - 1


def small_entries(source: str) -> Iterator[tuple[int, int]]:
    """Line and column, from 0, of each entry that begins with a small letter."""
    lines = source.splitlines()
    for begin, end in docstrings(source):
        section, margin, is_first = "", 0, False
        for number in range(begin, end + 1):
            line = lines[number]
            indent = len(line) - len(line.lstrip())
            if heading := SECTION.fullmatch(line):
                section, margin, is_first = heading[2], len(heading[1]), True
            elif line.strip() and indent <= margin:
                section = ""
            elif section and indent == margin + 4:
                start = indent
                if section not in {"Returns", "Yields"}:
                    name = NAMED.match(line)
                    start = name.end() if name else len(line)
                elif not is_first:
                    continue
                is_first = False
                if line[start : start + 1].islower() and not TYPE_OR_CODE.match(line, start):
                    yield number, start


def fixed(source: str) -> str:
    """The source with a capital at the beginning of each entry."""
    lines = source.splitlines(keepends=True)
    for number, start in small_entries(source):
        line = lines[number]
        lines[number] = line[:start] + line[start].upper() + line[start + 1 :]
    return "".join(lines)


def main() -> int:
    """0 when every entry begins as it should, or has been mended."""
    parser = argparse.ArgumentParser(description="Hold docstrings to one dialect.")
    parser.add_argument("--fix", action="store_true", help="write capitals where they are missing")
    fix = parser.parse_args().fix
    paths = sorted(SOURCES.rglob("*.py"))
    if len(paths) < 100:
        sys.exit(f"{SOURCES} has only {len(paths)} Python files: this looks in the wrong place")
    wrong = 0
    for path in paths:
        source = path.read_text(encoding="utf-8")
        if fix:
            path.write_text(fixed(source), encoding="utf-8")
            continue
        for number, start in small_entries(source):
            wrong += 1
            entry = source.splitlines()[number][start:]
            print(f"{path.relative_to(REPOSITORY)}:{number + 1}: begin with a capital: {entry!r}")
    if wrong:
        print("scripts/docstrings.py --fix mends them", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
