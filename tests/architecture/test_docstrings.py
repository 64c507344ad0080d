"""scripts/docstrings.py: one dialect for the sections of docstrings, and it finds and mends what differs."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

WRONG = '''
def scale(size: int, factor: float) -> float:
    """Multiply.

    Args:
        size: how large it is; a second
            line may begin small.
        factor: int32 ``[n]``, a type first.

    Returns:
        the product,
        on two lines.

    Raises:
        ValueError: it is negative.
    """
'''


@pytest.fixture(scope="module")
def script(repository: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("docstrings", repository / "scripts" / "docstrings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_sources_keep_to_it(repository: Path) -> None:
    done = subprocess.run(
        [sys.executable, repository / "scripts" / "docstrings.py"],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_small_letters_are_found_and_mended(script: ModuleType) -> None:
    lines = WRONG.splitlines()
    found = [lines[number][start:] for number, start in script.small_entries(WRONG)]
    assert found == ["how large it is; a second", "the product,", "it is negative."]
    mended = script.fixed(WRONG)
    assert list(script.small_entries(mended)) == []
    assert mended.lower() == WRONG.lower()
    assert "factor: int32" in mended
