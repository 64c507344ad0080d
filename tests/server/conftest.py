"""Fixtures of the server's tests: the application over a fake engine, and servers as processes of their own."""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Test folders are not packages: what tests share is imported by name from this folder.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def empty_tmpdir() -> Iterator[Path]:
    """A directory with a short path for a server's ``TMPDIR``; afterwards nothing may be left in it."""
    directory = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    yield directory
    left = list(directory.rglob("*"))
    shutil.rmtree(directory)
    assert left == []
