"""A start without enough memory prints one line that says so."""

import os
import resource
import subprocess
import sys

import pytest

from rustvllm.process.startup_memory import LEAST_ADDRESS_SPACE, explain_shortage


def run(limit, *command):
    def restrict():
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    return subprocess.run(
        [sys.executable, *command], preexec_fn=restrict, capture_output=True, text=True, timeout=60, check=False,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.parametrize("command", ["serve", "run-batch", "trace", "bench"])
@pytest.mark.parametrize("mebibytes", [60, 200])
def test_no_room_for_the_first_libraries_is_one_line(command, mebibytes):
    assert mebibytes << 20 < LEAST_ADDRESS_SPACE
    done = run(mebibytes << 20, "-m", "rustvllm.cli.main", command)
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    assert line.startswith(
        f"rustvllm {command}: error: the address space of this process is limited to {mebibytes} MiB"
    )
    assert "at least 256 MiB" in line


def test_no_room_for_torch_is_one_line():
    done = run(1 << 30, "-m", "rustvllm.cli.main", "serve", "--port", "0")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("rustvllm serve: error: there is not enough memory to start (")
    assert "its address space is limited to 1024 MiB, raise it (ulimit -v)" in done.stderr


@pytest.mark.parametrize("name", ["output", "parent", "complaints", "engine-process-0", "api-process-0"])
def test_no_thread_left_is_one_line_whichever_it_is(tmp_path, name):
    (tmp_path / "sitecustomize.py").write_text(
        "import threading\n"
        "start = threading.Thread.start\n"
        "def refuse(thread):\n"
        f"    if thread.name.lower().replace(' ', '-').startswith('rustvllm-{name}'):\n"
        '        raise RuntimeError("can\'t start new thread")\n'
        "    start(thread)\n"
        "threading.Thread.start = refuse\n",
        encoding="utf-8",
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "rustvllm.cli.main", "serve", "--executor", "sim", "--port", "0"],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert done.stderr.splitlines()[-1].startswith("rustvllm serve: error: the system refused a thread or a process (")


@pytest.mark.parametrize(
    ("error", "is_shortage"),
    [
        (MemoryError(), True),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("can't start new thread"), True),
        (BlockingIOError(11, "Resource temporarily unavailable"), True),
        (BlockingIOError(11, "write could not complete without blocking"), False),
        (SystemError("<function _find_and_load> returned NULL without setting an exception"), True),
        (ImportError("No module named 'torch'"), False),
        (FileNotFoundError(2, "No such file or directory"), False),
        (ValueError("cannot allocate memory"), False),
    ],
)
def test_what_counts_as_a_lack_of_memory(error, is_shortage):
    assert (explain_shortage(error) is not None) == is_shortage
