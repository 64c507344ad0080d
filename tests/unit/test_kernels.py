"""Runs ``tests/kernels`` in Triton's interpreter, which has to be chosen before anything imports Triton."""

import os
import re
import subprocess
import sys

import pytest


@pytest.mark.timeout(600)
def test_the_kernels_in_the_interpreter(repository):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/kernels", "-q", "-p", "no:cacheprovider"],
        cwd=repository,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert int(passed[1]) >= 15, f"the interpreter ran too few tests to say anything: {done.stdout}"
