"""What run-batch says on stderr does not decide its exit code."""

import subprocess
import sys
from pathlib import Path

CODE = """
from rustvllm.cli.run_batch import _say
_say("3 answers")
_say("and no more")
"""


def test_messages_that_cannot_be_written_fail_nothing():
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([sys.executable, "-c", CODE], check=False, stderr=full, timeout=60)
    assert done.returncode == 0


def test_messages_that_can_be_written_are():
    done = subprocess.run([sys.executable, "-c", CODE], check=True, stderr=subprocess.PIPE, timeout=60)
    assert done.stderr == b"rustvllm run-batch: 3 answers\nrustvllm run-batch: and no more\n"
