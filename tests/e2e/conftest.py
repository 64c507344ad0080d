"""Fixtures of the tests of whole engines."""

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def folder(shared_dir: Path) -> Path:
    """stories260K: a Llama of 512 words, in float32."""
    return shared_dir / "data/stories260K/hf"


@pytest.fixture(scope="module")
def rank_environment() -> Iterator[None]:
    """Engines of several ranks check their invariants after every step, and each rank computes with one thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUSTVLLM_CHECK_INVARIANTS", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
