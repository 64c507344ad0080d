"""scripts/tree_counts.py counts code, not words about it, and imports between packages by their first name."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = '''"""What it is for.

In two paragraphs.
"""

import json  # a comment
from rustvllm import _core
from rustvllm.engine.core import EngineCore

# A comment.
NAMES = """
a text, not a docstring
"""
"""What NAMES is."""


def one() -> int:
    """A docstring."""
    return 1
'''


@pytest.fixture(scope="module")
def tree_counts(repository: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("tree_counts", repository / "scripts" / "tree_counts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_docstrings_comments_and_blank_lines_are_no_code(tree_counts: ModuleType) -> None:
    assert tree_counts.code_lines(SOURCE) == 3 + 3 + 2


def test_imports_are_counted_by_package(tree_counts: ModuleType) -> None:
    assert tree_counts.imported_rooms(SOURCE) == {"_core", "engine"}


def test_the_page_names_the_largest_folder(tree_counts: ModuleType, repository: Path) -> None:
    folders: dict[str, int] = {}
    for path, _ in tree_counts.sources(None):
        if not path.endswith("__init__.py"):
            folders[path.rpartition("/")[0]] = folders.get(path.rpartition("/")[0], 0) + 1
    assert len(folders) > 20, "the folders are not found"
    assert max(folders.values()) <= 20
    page = (repository / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert "scripts/tree_counts.py ab24904" in page
