"""``StallReporter``: reports which rank is behind, what it waits in, and its state according to the kernel."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rustvllm.distributed.commands import wait_of
from rustvllm.distributed.stages import ONE_STAGE, RankPlace
from rustvllm.logger import init_logger
from rustvllm.process.patient_join import patient_join

if TYPE_CHECKING:
    from rustvllm import _core
    from rustvllm.distributed.collective_time import CollectiveTime
    from rustvllm.executor.ranks import Ranks

logger = init_logger(__name__)

_LOOK_SECONDS = 0.5
_END_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank at one moment.

    Attributes:
        rank: Its number.
        pid: The id of its process.
        state: Its state, according to the kernel: ``running``, ``sleeping``, ``stopped``, …
        step_age: Seconds since its last progress, while it has something to do; else 0.
        waits_in: The collective that it is in; empty if it is in none.
        collective_seconds: Its total time in collectives.
        collectives: How many collectives it has finished.
        stage: Its pipeline stage, from 0.
        num_stages: How many stages there are.
        node_rank: The machine that it runs on.
        layer: The layer of the model whose collective it waits in; -1 for none.
    """

    rank: int
    pid: int
    state: str
    step_age: float
    waits_in: str
    collective_seconds: float
    collectives: int
    stage: int = 0
    num_stages: int = 1
    node_rank: int = 0
    layer: int = -1

    def __str__(self) -> str:
        name = "rank 0" if self.rank == 0 else f"worker rank {self.rank}"
        if self.num_stages > 1:
            name += f" of stage {self.stage}"
        of_layer = f" of layer {self.layer}" if self.layer >= 0 else ""
        where = f"waits in {self.waits_in}{of_layer}" if self.waits_in else "is in no collective"
        return f"{name} (node {self.node_rank}, pid {self.pid}) is {self.state} and {where}"


class StallReporter:
    """Checks the ranks twice a second, in its own thread, and reports when they make no progress.

    Args:
        ranks: The ranks that follow.
        writer: The writer of the step channel.
        own: Rank 0's time in collectives.
        stall_timeout: Seconds without progress after which it reports; 0 disables reports.
        first: Rank 0's place, which says how many ranks share a stage.
    """

    def __init__(
        self,
        ranks: Ranks,
        writer: _core.StepWriter,
        own: CollectiveTime,
        stall_timeout: float = 60.0,
        first: RankPlace = ONE_STAGE,
    ) -> None:
        self._ranks, self._writer, self._own, self._stall_timeout = ranks, writer, own, stall_timeout
        self._first = first
        self._seen: list[tuple[int, float]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_reported = False

    def start(self) -> None:
        """Begin to check."""
        if self._stall_timeout and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rustvllm-rank-watch", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop checking; returns when the thread has ended, or after five seconds.

        A thread that is in native code when the interpreter ends can take the process down with it.
        """
        self._stop.set()
        if self._thread is not None:
            patient_join(self._thread, _END_SECONDS)

    def views(self) -> list[RankView]:
        """The state of each rank, rank 0 first."""
        ages = self._ages()
        own = RankView(
            0,
            os.getpid(),
            "running",
            max(ages, default=0.0),
            self._own.current,
            self._own.seconds,
            self._own.calls,
            self._first.stage,
            self._first.num_stages,
            layer=self._own.layer if self._own.current == "all_reduce" else -1,
        )
        waits = [wait_of(line["activity"]) for line in self._writer.lines()]
        return [own] + [
            RankView(
                process.rank,
                process.pid,
                process.state,
                age,
                name,
                line["activity_ns"] / 1e9,
                line["activities"],
                replace(self._first, rank=process.rank).stage,
                self._first.num_stages,
                process.node_rank,
                layer,
            )
            for process, line, (name, layer), age in zip(
                self._ranks.processes, self._writer.lines(), waits, ages, strict=True
            )
        ]

    def describe(self) -> str:
        """Describe which ranks are behind, and what the others wait in.

        Those behind are the stopped ranks, else the ranks that run a step without waiting for another, else all.
        """
        views = self.views()
        behind = [view for view in views if view.state.startswith("stopped")]
        behind = behind or [view for view in views if view.step_age and not view.waits_in] or views
        others = [view for view in views if view not in behind and view.waits_in]
        return "; ".join(map(str, behind + others))

    def look(self) -> str | None:
        """The report, once the ranks have made no progress for the timeout; only once for each stall."""
        ages = self._ages()
        longest = max(ages, default=0.0)
        if longest < self._stall_timeout:
            self._has_reported = False
            return None
        if self._has_reported:
            return None
        self._has_reported = True
        return f"no step ended for {longest:.1f} s: {self.describe()}"

    def _ages(self) -> list[float]:
        """How many seconds each follower rank has had something to do without progress."""
        now, published = time.monotonic(), self._writer.published
        done = [line["done"] for line in self._writer.lines()]
        if len(self._seen) != len(done):
            self._seen = [(number, now) for number in done]
        self._seen = [
            (number, now if number == published or number != before else since)
            for number, (before, since) in zip(done, self._seen, strict=True)
        ]
        return [now - since for _, since in self._seen]

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_SECONDS):
            report = self.look()
            if report is None:
                continue
            logger.error("%s", report)
            logger.error("the Python stack of rank 0:\n%s", stack_of_main_thread())
            for process in self._ranks.processes:
                if not process.state.startswith("stopped"):
                    logger.error("the Python stack of %s:\n%s", process.place, process.stack())


def stack_of_main_thread() -> str:
    """The stack of this process's main thread, as in a traceback."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 -- Python's only name for it
    return "unknown" if frame is None else "".join(traceback.format_stack(frame)).rstrip()
