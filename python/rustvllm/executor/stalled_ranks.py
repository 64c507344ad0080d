"""``StallReporter``: which rank is behind, what it waits in, and what the kernel says that it does."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rustvllm.distributed.commands import WAITS
from rustvllm.distributed.stages import ONE_STAGE, RankPlace
from rustvllm.executor.ranks import ask_for_stack, state_of
from rustvllm.logger import init_logger

if TYPE_CHECKING:
    from rustvllm import _core
    from rustvllm.distributed.rank_group import CollectiveTime
    from rustvllm.executor.ranks import Ranks

logger = init_logger(__name__)

_LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank at one moment.

    Attributes:
        rank: Which one.
        pid: Of its process.
        state: What the kernel says: ``running``, ``sleeping``, ``stopped``, …
        step_age: Seconds since its last sign of progress, while it has something to do; else 0.
        waits_in: The collective that it is in; empty: none.
        collective_seconds: In collectives so far.
        collectives: How many ended.
        stage: Which group of layers it has, from 0.
        num_stages: How many there are.
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

    def __str__(self) -> str:
        name = "rank 0" if self.rank == 0 else f"worker rank {self.rank}"
        if self.num_stages > 1:
            name += f" of stage {self.stage}"
        where = f"waits in {self.waits_in}" if self.waits_in else "is in no collective"
        return f"{name} (node 0, pid {self.pid}) is {self.state} and {where}"


class StallReporter:
    """Looks at the ranks twice a second, in a thread of its own, and reports a group that makes no progress.

    Args:
        ranks: That follow.
        writer: Of the step channel.
        own: Rank 0's time in collectives.
        stall_timeout: Seconds without progress that are reported; 0: nothing is.
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
        """Look from now on."""
        if self._stall_timeout and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rustvllm-rank-watch", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stop.set()

    def views(self) -> list[RankView]:
        """How each rank is, rank 0 first."""
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
        )
        return [own] + [
            RankView(
                process.rank,
                process.pid,
                state_of(process.pid),
                age,
                WAITS[min(line["activity"], len(WAITS) - 1)],
                line["activity_ns"] / 1e9,
                line["activities"],
                replace(self._first, rank=process.rank).stage,
                self._first.num_stages,
            )
            for process, line, age in zip(self._ranks.processes, self._writer.lines(), ages, strict=True)
        ]

    def describe(self) -> str:
        """Who is behind, in words: ranks that are stopped, else those that run a step and wait for none, else all."""
        views = self.views()
        behind = [view for view in views if view.state.startswith("stopped")]
        behind = behind or [view for view in views if view.step_age and not view.waits_in] or views
        return "; ".join(str(view) for view in behind)

    def look(self) -> str | None:
        """The report, once the group has made no progress for as long as the timeout; once for each stall."""
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
        """Seconds for which each rank that follows has had something to do without progress."""
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
            for process in self._ranks.processes:
                if not state_of(process.pid).startswith("stopped"):
                    ask_for_stack(process.pid)
