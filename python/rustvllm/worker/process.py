"""The process of a follower rank, ``python -m rustvllm.worker.process``; only rank 0 starts it.

It reads its order as JSON from standard input, joins the group of ranks, and then follows the step channel: it runs the
same steps over the same arrays as rank 0, without sampling. It makes no decisions. If it cannot follow, it reports the
error on a pipe and ends; it also ends when rank 0 is gone.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rustvllm import _core, envs
from rustvllm.config import EngineConfig
from rustvllm.distributed.commands import NOT_LOADED, Command, ReportedTime
from rustvllm.exceptions import ConfigError, RustVLLMError, SchedulerStateError
from rustvllm.logger import init_logger
from rustvllm.process.config_json import build
from rustvllm.process.output import serving_output
from rustvllm.process.parent_link import ParentLink

# Modules that need torch are imported after the link to the parent exists: the import takes seconds, ten on a busy
# machine, and a process without the link would meanwhile outlive its parent.
if TYPE_CHECKING:
    from rustvllm.worker.model_runner import GPUModelRunner
    from rustvllm.worker.worker import Worker

logger = init_logger(__name__)

EXIT_OK, EXIT_FAILURE = 0, 1
_WAIT_SECONDS = 60.0
"""While no frame comes, the time between two checks whether the channel was closed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Follow rank 0.

    Returns:
        The exit code: 0 after a shutdown, 1 when this rank failed or could not start.
    """
    link = ParentLink.from_command_line("python -m rustvllm.worker.process", argv)
    # If this process hangs, rank 0 makes it write its stack here and reads it; that needs nothing else of this process.
    stack = os.fdopen(os.memfd_create("rustvllm-stack"), "wb", buffering=0)
    faulthandler.register(signal.SIGUSR1, file=stack)
    reader: _core.StepReader | None = None
    has_joined = False
    try:
        serving_output.begin()
        import torch

        from rustvllm.distributed import facts, meetings, rendezvous
        from rustvllm.distributed.stages import RankPlace
        from rustvllm.worker.worker import Worker

        order = link.receive()
        config = build(EngineConfig, order["config"])
        if envs.logging_level() == "INFO":
            logging.getLogger("rustvllm").setLevel(logging.WARNING)  # rank 0 says the same
        place = RankPlace(order["rank"], order["tensor_size"], order["num_stages"])
        rank, size = place.rank, place.tensor_size * place.num_stages
        if (unlike := facts.difference(facts.rank_facts(config), order["facts"], rank)) is not None:
            raise ConfigError(unlike)
        reader = _core.StepReader(order["channel_fd"], order["seat"])
        device = torch.device(order["device"])
        store = rendezvous.join_store(order["port"], size, order["timeout"], order["host"])
        link.say_ready(
            link.age, {}, rank=rank, stack_fd=stack.fileno()
        )  # ready to join; the channel reports when the model is loaded
        in_rank_order, spent = config.device.batch_invariant, ReportedTime(reader)
        meeting = None
        if (fd := order["meeting_fds"].get(str(place.stage))) is not None:
            meeting = meetings.join_meeting(fd, place.tensor_rank, order["num_neighbours"])
        group, stage = rendezvous.join(
            store, place, device, order["timeout"], spent,
            in_rank_order=in_rank_order, meeting=meeting, host=order["own_host"],
        )  # fmt: skip
        has_joined = True
        worker = Worker(config, _core.SAMPLING_FLOAT_COLUMNS, _core.SAMPLING_INT_COLUMNS, group, stage)
        Follower(worker, reader, link.receive).run()
    except BaseException as error:
        if reader is not None:
            reader.fail()
        if isinstance(error, RustVLLMError) or not has_joined:
            link.say_error(error)
        else:
            logger.critical("this rank cannot continue", exc_info=error)
            link.say(death=f"{type(error).__name__}: {error}")
        return EXIT_FAILURE
    return EXIT_OK


class Follower:
    """Executes rank 0's commands, one frame after the other.

    Args:
        worker: This rank's worker; nothing is loaded yet.
        reader: The reader of the step channel.
        receive: Returns the next order from standard input, for commands that need more than numbers.
    """

    def __init__(self, worker: Worker, reader: _core.StepReader, receive: Callable[[], Mapping[str, Any]]) -> None:
        self._worker, self._reader, self._receive = worker, reader, receive

    def run(self) -> None:
        """Follow until a shutdown command comes or the channel is closed."""
        while True:
            number = self._reader.wait(_WAIT_SECONDS)
            if number is None:
                if self._reader.is_closed:
                    return
                continue
            command = Command(number)
            if command is Command.STEP:
                self._step()
                self._reader.finish()
                continue
            words = self._reader.words()
            if command is Command.SHUTDOWN:
                self._worker.shutdown()
                self._reader.finish()
                return
            self._reader.finish(self._do(command, words))

    def _do(self, command: Command, words: Sequence[int]) -> int:
        """Execute a command other than a step and return its answer."""
        if command is Command.LOAD:
            self._worker.load_model()
            if envs.check_invariants():
                from rustvllm.distributed import agreement

                agreement.watch(self._runner.model, self._worker.group)
            return self._worker.adapters_digest
        if command is Command.NUM_BLOCKS:
            return self._worker.determine_num_blocks()
        if command is Command.INIT_CACHE:
            self._initialize_cache(self._receive()["cache"])
        elif command is Command.WARM_UP:
            self._worker.warm_up()
        elif command is Command.ADD_ADAPTER:
            return self._add_adapter(self._receive()["adapter"])
        elif command is Command.REMOVE_ADAPTER:
            return int(self._worker.adapters.remove(words[0]))
        return 0

    def _add_adapter(self, adapter: Mapping[str, Any]) -> int:
        """The adapter's digest if it is loaded; ``NOT_LOADED`` if it cannot be, and steps go on without it."""
        adapters = self._worker.adapters
        try:
            adapters.add(adapter["number"], adapter["name"], Path(adapter["path"]))
        except RustVLLMError as error:
            logger.warning("this rank cannot load the adapter %r: %s", adapter["name"], error)
            return NOT_LOADED
        return adapters.digests.get(adapter["number"], 0)

    def _initialize_cache(self, cache: Mapping[str, Any]) -> None:
        spec = [(name, dtype, tuple(shape)) for name, dtype, shape in cache["spec"]]
        sets = self._worker.initialize_kv_cache(cache["num_blocks"], spec, cache["num_sets"], cache["num_cpu_blocks"])
        self._reader.register(sets)

    def _step(self) -> None:
        """Run a step as rank 0 does; its hidden states and logits are used only by the collectives in the model.

        Raises:
            SchedulerStateError: This rank would run the step in another way than rank 0.
        """
        step = self._reader.step()
        runner = self._runner
        output = cast("_core.SchedulerOutput", step)  # it has the numbers, and the runner reads nothing else
        own_size = runner.graph_size(output)
        if own_size != step.graph_size:
            raise SchedulerStateError(
                f"rank 0 runs step {step.step} in a graph of {step.graph_size} requests, but this rank in one of "
                f"{own_size} (0: without a graph); start all ranks with the same flags"
            )
        runner.execute_model(output)
        runner.follow_step()

    @property
    def _runner(self) -> GPUModelRunner:
        if self._worker.runner is None:
            raise SchedulerStateError("a step came before a model was loaded")
        return self._worker.runner


def follower_config(config: EngineConfig) -> EngineConfig:
    """The configuration of a follower rank: rank 0's, without parts that only sampling needs, and without a bar."""
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, logits_processors=()),
        load=dataclasses.replace(config.load, use_tqdm_on_load=False),
        tracing=type(config.tracing)(),
        step_trace_file=None,
    )


if __name__ == "__main__":
    # Skip the normal teardown of torch, which takes seconds: nothing is left to be done.
    serving_output.leave(main())
