"""Freed memory stays with the process, so that a step's activations are not cleared again by the system."""

import platform
import subprocess
import sys

import pytest

CODE = """
import resource, torch
from rustvllm.worker.memory.allocator import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        a, b = torch.ones(16 << 20), torch.ones(16 << 20)  # 64 MiB each, beyond what glibc keeps by itself
        del a, b
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
torch.set_num_threads(1)
before = faults()
print(keep_freed_memory())
faults()
print(before, min(faults() for _ in range(3)))  # a heap that happens to move grows once more
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")
def test_memory_that_was_freed_is_used_again():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=100, check=True)
    told, before, after = done.stdout.split()
    if told != "True":
        pytest.skip("this glibc bounds what it keeps")
    assert int(after) < int(before) / 10


def test_a_c_library_that_cannot_be_told(monkeypatch):
    from rustvllm.worker.memory import allocator

    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda _name: object())
    assert allocator.keep_freed_memory() is False
