"""Kernels run in Triton's interpreter, in a process that ``tests/unit/test_kernels.py`` starts, or on a GPU.

In a process without ``TRITON_INTERPRET=1`` everything here counts as marked ``gpu``. In one with it what is marked
``gpu`` is skipped: bfloat16, of which the interpreter computes wrong products, and shapes that would take it hours.
"""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

HERE = Path(__file__).resolve().parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# For these tests' own helpers, the tiny checkpoints, and the naive engine.
sys.path[:0] = [str(HERE), str(HERE.parent / "models"), str(HERE.parent / "unit" / "worker")]


@pytest.hookimpl(tryfirst=True)  # before skips are handed out for the mark
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent != HERE:
            continue
        if INTERPRETED and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="TRITON_INTERPRET=1: the interpreter is not a GPU"))
        elif not INTERPRETED:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device():
    """Where kernels compute."""
    return torch.device("cpu") if INTERPRETED else torch.device("cuda", 0)


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """These tensors are so small that a second thread only costs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="package")
def lean_interpreter():
    """Kernels are interpreted without what costs most and changes nothing."""
    if not INTERPRETED:
        yield
        return
    import lean_interpreter

    with pytest.MonkeyPatch.context() as patch:
        lean_interpreter.install(patch)
        yield


@pytest.fixture
def rows_alike(monkeypatch):
    """Products of the interpreter whose rows are added in one order, wherever in a tile they stand.

    The interpreter multiplies with BLAS, and on some processors that adds the rows at a tile's edge in another order
    than those within. A GPU's matrix unit does not; so what is compared bit for bit is multiplied without BLAS.
    """
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    def create_dot(_builder, a, b, d, _input_precision, _max_num_imprecise_acc):
        assert a.data.dtype == b.data.dtype == np.float32
        return interpreter.TensorHandle(np.einsum("mk,kn->mn", a.data, b.data) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
