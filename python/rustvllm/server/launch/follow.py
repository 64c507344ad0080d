"""``rustvllm serve --headless --node-rank 1``: a machine whose ranks are started for an engine on another one."""

import argparse
import os
import signal
import time
from typing import TYPE_CHECKING

from rustvllm.config.engine_args import AsyncEngineArgs
from rustvllm.distributed.facts import node_facts
from rustvllm.exceptions import EngineDeadError, RustVLLMError
from rustvllm.executor.follower_node import FollowerNode
from rustvllm.server.flags.settings import SIGNAL_ECHO_SECONDS
from rustvllm.server.launch import console
from rustvllm.server.launch.restart_budget import RestartBudget

if TYPE_CHECKING:
    from rustvllm.server.launch.process_layout import ProcessLayout

HEAD_SECONDS = 60.0
"""For the head to be there, unless ``--distributed-timeout-seconds`` says more or less."""


def follow_head(args: argparse.Namespace, layout: "ProcessLayout", *, restarts: bool) -> int:
    """Hold this machine's ranks until the head ends.

    Args:
        args: Parsed flags of the engine.
        layout: Has the secret.
        restarts: Wait for the head's next engine when one has failed.

    Returns:
        The exit code: 0 after a shutdown, the head's or this node's own, and 1 after a failure, which was printed.
    """
    try:
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
        facts = node_facts(config)
    except RustVLLMError as error:
        console.complain(str(error))
        return 1
    assert layout.secret is not None
    seconds = config.parallel.distributed_timeout_seconds or HEAD_SECONDS
    budget, signals = RestartBudget(), StopSignals()
    while signals.why() is None:
        node = FollowerNode(config, facts, layout.secret, console.say, signals.why)
        try:
            node.run(seconds)
        except (RustVLLMError, OSError) as error:
            if signals.why() is not None:  # what then goes wrong is a consequence
                break
            if not (isinstance(error, EngineDeadError) and restarts and budget.take()):
                console.complain(str(error))
                return 1
            console.say(f"{error}; waiting for its next engine ({budget.used})")
        else:
            break
    return 0


class StopSignals:
    """Takes SIGINT and SIGTERM: the first asks this node to stop, a later one ends the process, and its ranks with it.

    The handler only remembers the signal, so that none is lost between two engines. A node that waits looks for it
    every half a second: Python runs handlers in the main thread, and a signal that another thread got does not wake
    that.

    Attributes:
        stopped_by: The first signal; None: there was none.
    """

    def __init__(self) -> None:
        self.stopped_by: signal.Signals | None = None
        self._stopped_at = 0.0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._take)

    def why(self) -> str | None:
        """The reason that the head gets; None: go on."""
        return None if self.stopped_by is None else f"was stopped by {self.stopped_by.name}"

    def _take(self, number: int, _frame: object) -> None:
        if self.stopped_by is None:
            self.stopped_by, self._stopped_at = signal.Signals(number), time.monotonic()
        elif time.monotonic() - self._stopped_at > SIGNAL_ECHO_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
