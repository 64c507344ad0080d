"""Runs tests, then those that failed once more, alone. Called by `make test-rust`, `test-python` and `test-slow`.

    scripts/rerun_alone.py cargo test --quiet
    scripts/rerun_alone.py python -m pytest --numprocesses 3 -m "not slow"

Several tests share each processor, so one that waits a second too few can fail on a crowded machine although nothing
is broken. A test that fails alone too is a failure, and so are more than MAX_RERUN of them, which no crowd explains.
A test that passes alone is a test to mend: its name is printed, and appended to the file that $PASSED_ALONE
names, which `.ci/run` shows in its summary.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

MAX_RERUN = 4
"""Failed tests (Python) or test programs (Rust) that are run again; with more, none is."""
PYTEST_TESTS_FAILED = 1
"""pytest's exit status when tests ran and some failed (other statuses: interrupted, wrong arguments, none found)."""


def run_pytest(command: Sequence[str]) -> int:
    """Run `command`, which is a call of pytest, then its failed tests in one process; return the exit status."""
    with tempfile.TemporaryDirectory() as cache:
        command = [*command, "-o", f"cache_dir={cache}"]
        status = subprocess.call(command)
        failed_file = Path(cache, "v", "cache", "lastfailed")
        if status != PYTEST_TESTS_FAILED or not failed_file.exists():
            return status
        failed = sorted(json.loads(failed_file.read_text()))
        if not may_run_again(failed):
            return status
        status = subprocess.call([*command, "--last-failed", "--numprocesses", "0"])
    return report(failed, status)


def run_cargo(command: Sequence[str]) -> int:
    """Run `command`, which is a call of `cargo test`, then its failed programs, a test at a time; return the status."""
    cargo = subprocess.Popen([*command, "--no-fail-fast"], stderr=subprocess.PIPE, text=True)
    assert cargo.stderr is not None
    failed = []
    for line in cargo.stderr:
        sys.stderr.write(line)
        # What cargo ends with: a line for each program, which is also how it is called by itself.
        if match := re.fullmatch(r" +`(-p \S+ (?:--\S+)(?: \S+)?)`\n", line):
            failed.append(match[1])
    status = cargo.wait()
    if status == 0 or not may_run_again(failed):
        return status
    # One after the other, and all of them: each shall be named.
    statuses = [subprocess.call([*command, *program.split(), "--", "--test-threads=1"]) for program in failed]
    return report(failed, max(statuses, key=abs))


def may_run_again(failed: Sequence[str]) -> bool:
    """Whether so few failed that the machine may have been the cause."""
    if len(failed) > MAX_RERUN:
        print(f"\n{len(failed)} failed: more than the {MAX_RERUN} that are run again", flush=True)
    return 0 < len(failed) <= MAX_RERUN


def report(failed: Sequence[str], status: int) -> int:
    """Name the tests that passed alone, when all did; return `status`, that of their second run."""
    if status == 0:
        lines = "".join(f"  passes alone, failed with others: {name}\n" for name in failed)
        print(f"\n{lines}A test that needs a quiet machine is a test to mend.", flush=True)
        if file := os.environ.get("PASSED_ALONE"):
            with Path(file).open("a") as opened:
                opened.write(lines)
    return status


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    run = run_pytest if "pytest" in sys.argv else run_cargo
    sys.exit(run(sys.argv[1:]))
