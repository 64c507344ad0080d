"""A node without an engine of its own heeds every signal, whatever it is doing."""

import argparse
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from rustvllm.exceptions import EngineDeadError
from rustvllm.server.launch import follow

WHEN = ["made", "runs", "failed"]


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_node_that_follows_one_engine_after_the_other(monkeypatch, when, number):
    made = []

    class Node:
        def __init__(self, config, facts, secret, say, why_stop):
            made.append(self)
            self._why_stop = why_stop
            if when == "made" and len(made) == 2:
                os.kill(os.getpid(), number)

        def run(self, seconds):
            assert seconds == follow.HEAD_SECONDS
            if len(made) == 1:
                raise EngineDeadError("the head has failed")
            if when != "made":
                os.kill(os.getpid(), number)
            assert self._why_stop() == f"was stopped by {number.name}"
            if when == "failed":
                raise EngineDeadError("the head has ended, too")

    config = SimpleNamespace(parallel=SimpleNamespace(distributed_timeout_seconds=None))
    args = SimpleNamespace(create_engine_config=lambda: config)
    monkeypatch.setattr(follow, "AsyncEngineArgs", SimpleNamespace(from_cli_args=lambda _: args))
    monkeypatch.setattr(follow, "node_facts", lambda _: {})
    monkeypatch.setattr(follow, "FollowerNode", Node)
    assert follow.follow_head(argparse.Namespace(), SimpleNamespace(secret=b"secret"), restarts=True) == 0
    assert len(made) == 2


def test_a_later_signal_ends_the_process_by_itself():
    code = (
        "import os, signal, time\nfrom rustvllm.server.launch.follow import StopSignals\nsignals = StopSignals()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\nos.kill(os.getpid(), signal.SIGTERM)\n"
        "print(signals.why(), flush=True)\ntime.sleep(0.4)\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == -signal.SIGTERM
    assert ended.stdout == "was stopped by SIGTERM\n"
