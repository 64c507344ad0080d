"""Runs ``tests/kernels`` in Triton's interpreter, which has to be chosen before anything imports Triton."""

import os
import re
import subprocess
import sys
from collections import Counter

import pytest

LEAST = {
    "kv_write": 3,
    "large_caches": 1,
    "layers": 8,
    "lora": 8,
    "models": 3,
    "paged_attention": 8,
    "quantized_matmul": 13,
    "quantized_models": 4,
    "rotary_write": 3,
    "sampling": 3,
    "tile_list": 5,
    "verify": 17,
}
"""How many tests of a file the interpreter has to run at least: with fewer it would say nothing."""

WHOLE_MODELS = ["lora", "models", "quantized_models"]
PROCESSES = {"models": WHOLE_MODELS, "kernels": [name for name in LEAST if name not in WHOLE_MODELS]}
"""Files that a process runs: each imports torch, and those of models transformers, which takes as long as a file."""


def test_every_file_of_kernels_is_run(repository):
    files = (repository / "tests" / "kernels").glob("test_*.py")
    assert {path.stem.removeprefix("test_") for path in files} == set(LEAST)
    assert sorted(name for names in PROCESSES.values() for name in names) == sorted(LEAST)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("process", PROCESSES)
def test_the_kernels_in_the_interpreter(repository, process):
    names = PROCESSES[process]
    files = [f"tests/kernels/test_{name}.py" for name in names]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *files, "-q", "-rap", "-p", "no:cacheprovider"],
        cwd=repository,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = Counter(re.findall(r"^PASSED tests/kernels/test_(\w+)\.py::", done.stdout, re.MULTILINE))
    for name in names:
        assert passed[name] >= LEAST[name], f"the interpreter ran too few tests to say anything: {done.stdout}"
