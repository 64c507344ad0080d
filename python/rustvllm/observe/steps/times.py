"""``StepTimes``: when each part of a step began; for metrics, traces and the live page.

::

    schedule → prepare → forward → sample → wait → update
             ^         ^         ^        ^      ^        ^
        prepare_ns forward_ns sample_ns launched_ns done_ns end_ns

On the CPU each part is work that is done when the next part begins, and the parts add up to the step. On a GPU, and
with ``async_scheduling``, ``forward`` and ``sample`` end when their work has been launched, and ``wait`` includes the
rest of that work and, if steps overlap, the planning of the next step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic_ns
from typing import TypeAlias


@dataclass(slots=True)
class StepTimes:
    """One step; times in nanoseconds of CLOCK_MONOTONIC, ascending, set while the step runs.

    Attributes:
        step: Its number, ``SchedulerOutput.step``.
        schedule_ns: The scheduler is about to be called.
        num_tokens: Scheduled tokens.
        num_reqs: Scheduled requests.
        prepare_ns: The executor gets the step and moves its arrays to the device.
        forward_ns: The model begins to run.
        sample_ns: The forward pass has returned, sampling begins.
        launched_ns: Sampling has returned.
        done_ns: The sampled ids are on the host, or the step has failed.
        end_ns: The scheduler has processed the ids.
        tower_ns: How much of the time from ``prepare_ns`` to ``forward_ns`` computed features of images.
    """

    step: int
    schedule_ns: int
    num_tokens: int
    num_reqs: int
    prepare_ns: int
    forward_ns: int = 0
    sample_ns: int = 0
    launched_ns: int = 0
    done_ns: int = 0
    end_ns: int = 0
    tower_ns: int = 0

    def end_launch(self, forward_ns: int, tower_ns: int = 0) -> None:
        """Note that forward pass and sampling have returned or raised; a failed launch uses its end for later parts.

        Args:
            forward_ns: When the model began to run, from the executor; that of an older step if this one failed before.
            tower_ns: Time in which features of images were computed before that; likewise.
        """
        self.launched_ns = monotonic_ns()
        self.sample_ns = self.sample_ns or self.launched_ns
        self.forward_ns = min(max(forward_ns, self.prepare_ns), self.sample_ns)
        self.tower_ns = min(tower_ns, self.forward_ns - self.prepare_ns)

    def until_done(self) -> tuple[int, int, int, int, int, int]:
        """``schedule_ns`` to ``done_ns``, in the order of ``Scheduler.record_step_times``."""
        return self.schedule_ns, self.prepare_ns, self.forward_ns, self.sample_ns, self.launched_ns, self.done_ns


StepObserver: TypeAlias = Callable[[StepTimes], object]
"""Called in the engine's thread after a step: it must be quick, and must not raise."""
