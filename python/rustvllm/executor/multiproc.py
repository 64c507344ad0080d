"""Runs several ranks that share one model: rank 0 in this process, each other one in its own process.

Rank 0 decides, samples and answers; the others run the same steps over the same arrays (``worker/process.py``). Their
commands go over the step channel. Tensors pass between ranks inside the model's layers, and from stage to stage.

If the layers are divided into stages, rank 0 has the last stage. It makes the other ranks begin a step at once, and
runs its own part when the step's tokens are needed: by then the earlier stages already run the next steps.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rustvllm import _core, envs
from rustvllm.distributed import agreement, facts, meetings, nodes, rendezvous
from rustvllm.distributed.commands import NOT_LOADED, Command
from rustvllm.distributed.rank_group import RankGroup
from rustvllm.distributed.stages import WHOLE, RankPlace, Stage
from rustvllm.exceptions import ConfigError, DeviceFailedError, ModelLoadError, RustVLLMError, SchedulerStateError
from rustvllm.executor.head import Head
from rustvllm.executor.ranks import Ranks
from rustvllm.executor.ray import RayPlacement
from rustvllm.executor.stalled_ranks import RankView, StallReporter
from rustvllm.executor.steps_ahead import AwaitedStep, StepAhead
from rustvllm.executor.uniproc import UniProcExecutor
from rustvllm.logger import init_logger
from rustvllm.process.address import read_secret
from rustvllm.process.config_json import plain
from rustvllm.worker.process import follower_config
from rustvllm.worker.worker import Worker, resolve_device

if TYPE_CHECKING:
    from typing import Any

    import numpy as np
    from torch._C._distributed_c10d import Store

    from rustvllm.config import EngineConfig
    from rustvllm.sample.grammar_output import GrammarOutput
    from rustvllm.worker.step_buffers import BufferSpec
    from rustvllm.worker.step_output import AsyncModelRunnerOutput, ModelRunnerOutput

logger = init_logger(__name__)

_JOIN_SECONDS = 60.0
"""How long a rank may take to import torch and join, on a busy machine."""
_NODE_SECONDS = 60.0
"""How long to wait for the other nodes, unless ``distributed_timeout_seconds`` is set."""
_NEWS_SECONDS = 1.0
"""How long to wait for news of a rank's end: the collective that it broke fails a moment earlier."""


class MultiProcExecutor(UniProcExecutor):
    """Executes steps on several ranks, on this machine and on others; starts them or waits for them when it is made.

    Args:
        config: The engine's configuration.
        secret: The secret that other nodes must know; None reads it from the environment.

    Raises:
        ConfigError: A rank or node differs from this one in something that must be the same on all.
        ModelLoadError: A rank or node did not come.
    """

    def __init__(self, config: EngineConfig, secret: bytes | None = None) -> None:
        parallel = config.parallel
        size, tensor_size, num_stages = (
            parallel.num_ranks, parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        )  # fmt: skip
        self._ahead: deque[StepAhead] | None = deque() if num_stages > 1 else None
        self._is_out_of_step = False
        timeout = parallel.distributed_timeout_seconds or rendezvous.DEFAULT_TIMEOUT_SECONDS
        self._limit = timeout
        self._writer = _core.StepWriter(size - 1)
        device = resolve_device(config.device.device)
        placement = RayPlacement(config) if parallel.distributed_executor_backend == "ray" else None
        self._head = head = self._make_head(config, secret, placement)
        own = nodes.NodeShare(0, 1 if head is None else head.nnodes, tensor_size, num_stages)
        self._host = head.host if head is not None else rendezvous.HOST
        # Each stage has its own; this rank takes part in that of its stage, and only makes the memory of the others.
        self._meetings = meetings.make_meetings(own, device.type)
        self._ranks = Ranks(len(own.ranks), self._writer, self._meetings)
        self._end = weakref.finalize(self, _end, os.getpid(), self._ranks, self._writer, head, placement)
        with self._ended_on_error():
            if head is not None:
                if placement is not None:
                    placement.start(head.port)
                self._take_nodes(head, parallel.distributed_timeout_seconds or _NODE_SECONDS, device)
            store = rendezvous.open_store(size, timeout, self._host)
            self._ranks.order(
                {
                    "tensor_size": tensor_size,
                    "num_stages": num_stages,
                    "config": plain(follower_config(config)),
                    "facts": facts.rank_facts(config),
                    "host": self._host,
                    "port": store.port,
                    "timeout": timeout,
                    "device": device.type,
                },
                self._host,
            )
            self._ranks.wait_for_hellos(_JOIN_SECONDS)
            place = RankPlace(0, tensor_size, num_stages)
            self._group, stage = self._join(store, place, device, in_rank_order=config.device.batch_invariant)
            worker = Worker(config, _core.SAMPLING_FLOAT_COLUMNS, _core.SAMPLING_INT_COLUMNS, self._group, stage)
        self._worker = worker
        stall = parallel.stall_timeout
        self.stalls = StallReporter(self._ranks, self._writer, self._group.time, stall, place)
        pids = ", ".join(str(process.pid) for process in self._ranks.processes)
        _running.add(self)
        # Exit hooks run last in, first out: this one comes before torch's own, which would find gloo's threads at work.
        atexit.unregister(_shut_down_at_exit)
        atexit.register(_shut_down_at_exit)
        logger.info("%d ranks share the model; the worker ranks have pid %s", size, pids)

    def _make_head(self, config: EngineConfig, secret: bytes | None, placement: RayPlacement | None) -> Head | None:
        """Start to accept other nodes; None if there are none."""
        parallel = config.parallel
        if placement is not None:
            placed = dataclasses.replace(config, parallel=placement.parallel)
            return Head(placed.parallel, placement.secret, facts.node_facts(placed), takes_any_port=True)
        if parallel.nnodes == 1:
            return None
        secret = secret or read_secret(None)
        if secret is None:
            raise ConfigError(
                f"nnodes is {parallel.nnodes}, and all nodes need the same secret of 16 bytes or more: set "
                "RUSTVLLM_ENGINE_SECRET, or --engine-secret-file, on each"
            )
        return Head(parallel, secret, facts.node_facts(config))

    def _take_nodes(self, head: Head, seconds: float, device: torch.device) -> None:
        for node in head.wait(seconds):
            first, count = node.ranks[0].rank, len(node.ranks)
            node.link.lead(self._writer, first, count)
            ranks = [rank.rank for rank in node.ranks]
            nodes.say(node.link, taken={"ranks": ranks, "nnodes": head.nnodes, "device": device.type})
            self._ranks.add_node(node)
        logger.info(
            "%d nodes share the model; they exchange tensors unencrypted over the network of %s",
            head.nnodes,
            head.host,
        )

    def load_model(self) -> None:
        """Load the weights, on each rank its own part; see ``UniProcExecutor.load_model``."""
        with self._ended_on_error(), self._by_all(Command.LOAD):
            super().load_model()
            if envs.check_invariants():
                agreement.watch(self._runner.model, self._group)
        own = self._worker.adapters_digest
        with self._ended_on_error():
            for rank, line in enumerate(self._writer.lines(), 1):
                if line["value"] != own:
                    raise ModelLoadError(
                        f"lora_modules: worker rank {rank} has read other adapters than rank 0; copy the same files to "
                        "each machine"
                    )
        if self._runner.share_ids is not None:
            self._runner.share_ids = self._share_ids

    def determine_num_blocks(self) -> int:
        """The number of KV blocks that the rank with the least room can hold; see ``Worker.determine_num_blocks``."""
        with self._ended_on_error():
            with self._by_all(Command.NUM_BLOCKS):
                num_blocks = super().determine_num_blocks()
            return min(num_blocks, *(line["value"] for line in self._writer.lines()))

    def determine_num_cpu_blocks(self, num_blocks: int) -> int:
        """The number of blocks in CPU memory for preempted requests; each rank has its part of every block.

        Raises:
            ConfigError: See ``Worker.determine_num_cpu_blocks``.
        """
        with self._ended_on_error():
            return super().determine_num_cpu_blocks(num_blocks)

    def initialize_kv_cache(
        self, num_blocks: int, buffer_spec: BufferSpec, num_sets: int, num_cpu_blocks: int = 0
    ) -> list[dict[str, np.ndarray[Any, Any]]]:
        """Allocate the cache on every rank; see ``UniProcExecutor.initialize_kv_cache``."""
        cache = {
            "num_blocks": num_blocks,
            "spec": list(buffer_spec),
            "num_sets": num_sets,
            "num_cpu_blocks": num_cpu_blocks,
        }
        with self._ended_on_error():
            self._ranks.order({"cache": cache})
            with self._by_all(Command.INIT_CACHE):
                sets = super().initialize_kv_cache(num_blocks, buffer_spec, num_sets, num_cpu_blocks)
            self._writer.register(sets)
            return sets

    def warm_up(self) -> None:
        """Warm up every rank; see ``UniProcExecutor.warm_up``. From now on a rank without progress is reported."""
        with self._ended_on_error(), self._by_all(Command.WARM_UP):
            super().warm_up()
        self.stalls.start()

    def add_adapter(self, number: int, name: str, path: str) -> None:
        """Load an adapter on every rank, or on none; see ``UniProcExecutor.add_adapter``.

        Raises:
            ModelLoadError: Another rank cannot load it, or has read other numbers. If this rank cannot load it, its own
                error is raised.
        """
        self._ranks.order({"adapter": {"number": number, "name": name, "path": path}})
        try:
            with self._by_all(Command.ADD_ADAPTER):
                super().add_adapter(number, name, path)
            self._check_answers(name, path, self._worker.adapters.digests.get(number, 0))
        except RustVLLMError:
            if self._ranks.death is None:
                self.remove_adapter(number)
            raise

    def _check_answers(self, name: str, path: str, own: int) -> None:
        """Check that each rank has read the numbers of the adapter that this rank has read, whose digest is ``own``."""
        for rank, line in enumerate(self._writer.lines(), 1):
            if line["value"] == NOT_LOADED:
                raise ModelLoadError(f"worker rank {rank} cannot load the adapter {name!r}; its log says why")
            if line["value"] != own:
                raise ModelLoadError(
                    f"adapter {name!r}: worker rank {rank} has read other numbers than rank 0. Its files in {path} are "
                    "others, or were written at that moment: copy the same files there, and load the adapter again"
                )

    def prepare_adapter(self, number: int, name: str, path: str) -> Callable[[], None]:
        """Read nothing yet: all ranks read the adapter together, between two steps."""
        return partial(self.add_adapter, number, name, path)

    def remove_adapter(self, number: int) -> bool:
        """Remove an adapter on every rank; see ``UniProcExecutor.remove_adapter``."""
        with self._by_all(Command.REMOVE_ADAPTER, number):
            return super().remove_adapter(number)

    def execute_model(self, scheduler_output: _core.SchedulerOutput) -> None:
        """Run the step on every rank; ``sample_tokens`` must follow.

        Raises:
            DeviceFailedError: A rank has ended, or this rank failed while the others wait for it.
        """
        with self._in_step():
            self._writer.publish_step(
                Command.STEP, scheduler_output, self._runner.graph_size(scheduler_output), self._limit
            )
            if self._ahead is None:
                super().execute_model(scheduler_output)
            else:
                self._ahead.append(StepAhead(scheduler_output, self._runner))

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> AsyncModelRunnerOutput:
        """Sample from the step just executed, on this rank only; if steps overlap, the other ranks get its ids.

        Raises:
            DeviceFailedError: See ``execute_model``.
        """
        if self._ahead is None:
            return super().sample_tokens(grammar_output)
        return AwaitedStep(partial(self._run_oldest, grammar_output))

    def discard_step(self) -> None:
        """See ``UniProcExecutor.discard_step``. Receives and drops what other stages computed of later steps."""
        if not self._is_out_of_step and self._ranks.death is None:
            with contextlib.suppress(DeviceFailedError):  # the next step raises it again
                self._runner.give_awaited()
        super().discard_step()
        while self._ahead:
            ahead = self._ahead.popleft()
            if not self._is_out_of_step and self._ranks.death is None:
                self._run(ahead)
                super().discard_step()

    def _run_oldest(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        assert self._ahead is not None
        self._run(self._ahead.popleft())
        return super().sample_tokens(grammar_output).get_output()

    def _run(self, ahead: StepAhead) -> None:
        """Run this rank's part of a step that the other stages run already."""
        with self._in_step(), ahead.rows_as_planned():
            super().execute_model(ahead.output)

    def _share_ids(self, ids: Tensor) -> Tensor:
        with self._in_step():
            return self._group.broadcast(ids)

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._is_out_of_step = True
            self._ranks.check(_NEWS_SECONDS)
            if isinstance(error, TimeoutError):
                raise DeviceFailedError(f"{error}: {self.stalls.describe()}") from error
            raise DeviceFailedError(
                "rank 0 failed in a step that the other ranks also run, so the ranks are out of step "
                f"({type(error).__name__}: {error})"
            ) from error

    def watch(self, on_death: Callable[[], object]) -> None:
        """See ``Executor``."""
        self._ranks.watch(on_death)

    def check(self) -> None:
        """See ``Executor``.

        Raises:
            DeviceFailedError: A rank has ended.
        """
        self._ranks.check()

    def rank_views(self) -> list[RankView]:
        """The state of each rank, rank 0 first."""
        return self.stalls.views()

    def rank_states(self) -> list[dict[str, Any]]:
        """See ``Executor``."""
        return [dataclasses.asdict(view) for view in self.rank_views()]

    def shutdown(self) -> None:
        """Free the model and the cache on every rank, and end the other ranks' processes."""
        _running.discard(self)
        self.stalls.stop()
        self._end()
        super().shutdown()
        # Nothing else refers to the group now, so gloo's threads end with it.
        self._group = self._worker.group = RankGroup(time=self._group.time)
        self._worker.stage = WHOLE

    @contextmanager
    def _by_all(self, command: Command, *words: int) -> Iterator[None]:
        """Make every other rank execute a command while this one runs the body, and wait for all."""
        try:
            number = self._writer.publish(command, list(words), self._limit)
            yield
            self._writer.wait_done(number, self._limit)
        except Exception as error:
            if isinstance(error, RustVLLMError) and not isinstance(error, SchedulerStateError):
                raise  # this rank's own error, and the other ranks can go on
            self._ranks.check(_NEWS_SECONDS)
            if isinstance(error, TimeoutError):
                raise DeviceFailedError(f"{error} ({command.name}): {self.stalls.describe()}") from error
            raise

    @contextmanager
    def _ended_on_error(self) -> Iterator[None]:
        """End all processes if a start fails."""
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(Exception):
                self._writer.give_up()
            self._ranks.tell_nodes(str(error))
            self._ranks.stop(0.0)
            self._end()
            raise

    def _join(
        self, store: Store, place: RankPlace, device: torch.device, *, in_rank_order: bool
    ) -> tuple[RankGroup, Stage]:
        """Join the other ranks in a thread, because a rank that ends meanwhile would block the call forever."""
        made: list[tuple[RankGroup, Stage] | BaseException] = []
        meeting = self._meetings.get(place.stage)
        done = threading.Event()

        def make() -> None:
            try:
                made.append(
                    rendezvous.join(
                        store, place, device, self._limit,
                        in_rank_order=in_rank_order, meeting=meeting, host=self._host,
                    )
                )  # fmt: skip
            except BaseException as error:  # noqa: BLE001 -- raised again in the caller's thread
                made.append(error)
            done.set()

        self._ranks.watch(done.set)
        threading.Thread(target=make, name="rustvllm-rendezvous", daemon=True).start()
        done.wait(self._limit)
        self._ranks.check()
        if not made or isinstance(made[0], BaseException):
            self._ranks.check(_NEWS_SECONDS)
            raise DeviceFailedError(f"the ranks did not find each other: {made[0] if made else 'no answer'}")
        return made[0]


_running: weakref.WeakSet[MultiProcExecutor] = weakref.WeakSet()


def _shut_down_at_exit() -> None:
    """End the ranks that a program leaves running, and this process's connections to them."""
    for executor in list(_running):
        with contextlib.suppress(Exception):
            executor.shutdown()


def _end(owner: int, ranks: Ranks, writer: _core.StepWriter, head: Head | None, placement: RayPlacement | None) -> None:
    """End the ranks: by a shutdown command if possible, else by killing them. In a fork of their owner, do nothing."""
    if os.getpid() != owner:
        return
    if head is not None:
        head.close()
    if ranks.death is None and not ranks.is_stopping:
        with contextlib.suppress(Exception):
            writer.publish(Command.SHUTDOWN, [], 1.0)
    writer.close()
    ranks.stop(0.0 if ranks.death is not None or ranks.is_stopping else 5.0)
    if placement is not None:
        placement.close()
