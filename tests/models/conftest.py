"""Puts the helpers of these tests, the naive scheduler, and the benchmarks' writers of checkpoints, on the path."""

import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "unit" / "worker")]
sys.path.append(str(HERE.parents[1] / "benches" / "python"))


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """These tensors are so small that a second thread only costs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
