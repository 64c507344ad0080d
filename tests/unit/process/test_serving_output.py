"""The output of a serving process: complete if it is read; no waiting and no failure if it is not."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

BEGIN = """
import logging, sys
from rustvllm.process.output import serving_output
from rustvllm.logger import init_logger
logger = init_logger("rustvllm.x")
serving_output.begin()
serving_output.begin()
"""


def run(code: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run([sys.executable, "-W", "error", "-c", BEGIN + code], check=False, timeout=60, **options)


def test_both_streams_in_order_and_nothing_is_lost_at_the_end():
    code = """
for number in range(3000):
    print("out", number)
    logger.warning("log %d", number)
raise SystemExit(3)
"""
    done = run(code, stderr=subprocess.STDOUT)
    assert done.returncode == 3
    lines = done.stdout.decode().splitlines()
    assert lines[::2] == [f"out {number}" for number in range(3000)]
    assert [line.rpartition("] ")[2] for line in lines[1::2]] == [f"log {number}" for number in range(3000)]


def test_an_uncaught_exception_is_seen_in_files_of_their_own(tmp_path):
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        done = run("print('printed', end='')\nraise ValueError('seen')", stdout=out, stderr=err)
    assert done.returncode == 1
    assert (tmp_path / "out").read_text() == "printed"
    assert (tmp_path / "err").read_text().endswith("ValueError: seen\n")


@pytest.mark.parametrize("ends", ["pass", "sys.exit(0)", "serving_output.leave(0)"])
def test_nothing_that_is_written_to_a_full_disk_changes_the_exit_code(ends):
    code = f"""
import warnings
print("printed")
print("half a line", end="")
logger.error("logged")
warnings.showwarning(UserWarning("warned"), UserWarning, "x", 1)
{ends}
"""
    with Path("/dev/full").open("wb") as full:
        assert run(code, stdout=full, stderr=full).returncode == 0


def test_a_pipe_that_is_full_holds_up_neither_work_nor_the_end():
    """This includes what native code writes to the descriptor itself."""
    reader, writer = os.pipe()
    code = """
import ctypes
for number in range(7000):
    print("x" * 100)
    logger.warning("y" * 100)
ctypes.CDLL(None).write(2, b"z" * 5000, 5000)
"""
    try:
        begin = time.monotonic()
        assert run(code, stdout=writer, stderr=writer).returncode == 0
        assert time.monotonic() - begin < 45  # the alternative is for ever
    finally:
        os.close(reader)
        os.close(writer)


def test_the_notice_is_an_object_where_lines_are_objects(tmp_path):
    code = """
import os
full = os.open("/dev/full", os.O_WRONLY)
kept = os.dup(2)
os.dup2(full, 2)
logger.warning("lost")
serving_output.drain()
os.dup2(kept, 2)
logger.warning("kept")
"""
    path = tmp_path / "err"
    with path.open("wb") as err:
        done = run(code, stderr=err, env={**os.environ, "RUSTVLLM_LOGGING_FORMAT": "json"})
    assert done.returncode == 0
    notice, line = map(json.loads, path.read_text().splitlines())
    assert notice["message"] == "1 log line was dropped: No space left on device"
    assert notice["level"] == "WARNING"
    assert line["message"] == "kept"


def test_handlers_of_a_configuration_hold_up_nothing(tmp_path):
    """One handler writes to a named pipe that is opened but not read, another to a file, which gets everything."""
    fifo, log, config = tmp_path / "fifo", tmp_path / "log", tmp_path / "logging.json"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    handlers = {
        "stuck": {"class": "logging.FileHandler", "filename": str(fifo)},
        "file": {"class": "logging.FileHandler", "filename": str(log)},
        "console": {"class": "logging.StreamHandler", "stream": "ext://sys.stdout"},
    }
    own = {"handlers": list(handlers), "level": "INFO", "propagate": False}
    config.write_text(json.dumps({"version": 1, "handlers": handlers, "loggers": {"rustvllm": own}}))
    code = """
for number in range(3000):
    logger.warning("%s %d", "x" * 100, number)
logger.warning("key %s", "hf_abcdefghijklmnop")
stuck, file = serving_output._handlers
assert file.drain(50)
assert not stuck.drain(0)
"""
    done = run(code, env={**os.environ, "RUSTVLLM_LOGGING_CONFIG_PATH": str(config)})
    assert done.returncode == 0, done.stderr
    expected = [f"{'x' * 100} {number}" for number in range(3000)] + ["key ***"]
    assert log.read_text().splitlines() == expected
    assert done.stdout.decode().splitlines() == expected
    assert os.read(reader, 1 << 16).startswith(b"x" * 100 + b" 0\n")
    os.close(reader)


def test_a_program_that_uses_the_package_writes_plainly():
    code = """
import sys, threading
streams = sys.stdin, sys.stdout, sys.stderr
import rustvllm
from rustvllm import LLM, AsyncLLM
from rustvllm.logger import init_logger
init_logger("rustvllm.x").warning("logged")
assert streams == (sys.stdin, sys.stdout, sys.stderr)
assert threading.active_count() == 1, threading.enumerate()
print("printed")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "printed\n"
    assert done.stderr.endswith("[rustvllm.x] logged\n")
