"""``rustvllm serve --headless --node-rank 1``: a machine whose ranks are started for an engine on another one."""

import argparse
import signal
from typing import TYPE_CHECKING

from rustvllm.config.engine_args import AsyncEngineArgs
from rustvllm.distributed.facts import node_facts
from rustvllm.exceptions import EngineDeadError, RustVLLMError
from rustvllm.executor.follower_node import FollowerNode
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
    budget, is_stopped = RestartBudget(), False
    current: list[FollowerNode] = []

    def leave(number: int, _frame: object) -> None:
        nonlocal is_stopped
        is_stopped = True
        for node in current:
            node.stop(f"was stopped by {signal.Signals(number).name}")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
    while not is_stopped:
        node = FollowerNode(config, facts, layout.secret, console.say)
        current[:] = [node]
        try:
            node.run(seconds)
        except EngineDeadError as error:
            if not (restarts and budget.take()):
                console.complain(str(error))
                return 1
            console.say(f"{error}; waiting for its next engine ({budget.used})")
        except (RustVLLMError, OSError) as error:
            console.complain(str(error))
            return 1
        else:
            break
    return 0
