"""A process that was started without standard input, output or error opens ``/dev/null`` in their place."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, socket, sys
from rustvllm.process.output.standard_streams import open_missing
open_missing()
open_missing()
taken = socket.socket()
assert taken.fileno() > 2, taken.fileno()
for number in (0, 1, 2):
    assert os.get_inheritable(number), number
assert sys.stdin.read() == ""
print("printed", flush=True)
print("an error", file=sys.stderr, flush=True)
taken.close()
open(sys.argv[1], "w").close()
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-", "<&- >&-", ""])
def test_missing_ones_are_dev_null(tmp_path, closed):
    command = ["bash", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-W", "error", "-c", SCRIPT]
    command.append(str(tmp_path / "done"))
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run(command, check=False, **options)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "done").exists()
    assert done.stdout == ("" if ">&-" in closed.replace("2>&-", "") else "printed\n")
    assert done.stderr == ("" if "2>&-" in closed else "an error\n")


def test_nothing_is_opened_where_nothing_is_missing():
    script = """
import os, sys
from rustvllm.process.output.standard_streams import open_missing
before = sys.stdin, sys.stdout, sys.stderr, os.listdir("/proc/self/fd")
open_missing()
assert before == (sys.stdin, sys.stdout, sys.stderr, os.listdir("/proc/self/fd"))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, env={**os.environ})
