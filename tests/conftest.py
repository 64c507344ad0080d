"""Fixtures and rules for every test: where shared data lies, when a GPU is there, how hard hypothesis looks."""

import gc
import os
import signal
import sys
from pathlib import Path

import hypothesis
import pytest

# A shell starts background jobs with Ctrl-C ignored, and every child inherits that. The tests press Ctrl-C on purpose.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).resolve().parent.parent

hypothesis.settings.register_profile("dev", max_examples=50, deadline=None)
# CI looks at more cases and must give the same verdict twice, so it takes the same cases each time.
hypothesis.settings.register_profile("ci", max_examples=200, deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))

UNFREEZE = gc.unfreeze
# Until all is collected: imports and tests make much and little garbage. The process that starts workers collects none.
if "PYTEST_XDIST_WORKER" in os.environ:
    gc.disable()

# Test folders are not packages: what several of them share is imported by name from this one.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder `shared` next to the clone, with reference checkpoints, tokenizers and golden outputs."""
    folder = REPOSITORY.parent / "shared"
    if not (folder / "data").is_dir():
        pytest.skip("no reference data: the folder ../shared/data is not next to this clone")
    return folder


def why_no_gpu() -> str | None:
    """The reason GPU tests cannot run here, None when they can."""
    if not Path("/dev/nvidiactl").exists():
        return "needs a CUDA device: there is no /dev/nvidiactl"
    import torch

    return None if torch.cuda.is_available() else f"needs a CUDA device: torch {torch.__version__} finds none"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` where no GPU is; torch is only asked when such a test was collected."""
    # The longest tests, which only compute, come first: what the workers begin with last decides when all are done.
    items.sort(key=lambda item: item.path.parts[-2:] != ("unit", "test_kernels.py"))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    reason = why_no_gpu() if gpu_items else None
    if reason:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Leaves each of several workers one thread of torch: together they have hardly more than there are processors."""
    torch = sys.modules.get("torch")  # imported by test modules by now, or by none
    if torch is not None and "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
    freeze_what_stays()


def freeze_what_stays() -> None:
    """Keeps the collector from walking through what was imported and collected, which stays until the end.

    These are a million objects, half a second of each full collection, and every engine that runs in a thread begins
    with one. Such engines freeze what there is and thaw all of it at their end, so neither does anything from here on:
    what tests make is collected as ever.
    """
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Lets the interpreter find all there is at its end; libraries would say that what is frozen has leaked."""
    UNFREEZE()
