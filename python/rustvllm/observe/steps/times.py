"""``StepTimes``: when each part of a step began; for metrics, traces and the live page.

::

    schedule → prepare → forward → sample → wait → update
             ^         ^         ^        ^      ^        ^
        prepare_ns forward_ns sample_ns launched_ns done_ns end_ns

On the CPU each part is work that has been done when the next begins, and the parts add up to the step. On a GPU, and
with ``async_scheduling``, ``forward`` and ``sample`` end when their work has been launched, and ``wait`` holds
the rest of its work and, with overlap, the planning of the next step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic_ns
from typing import TypeAlias


@dataclass(slots=True)
class StepTimes:
    """One step; times in nanoseconds of CLOCK_MONOTONIC, ascending, written as the step goes on.

    Attributes:
        step: Its number, ``SchedulerOutput.step``.
        schedule_ns: Before the scheduler was asked.
        num_tokens: That were scheduled.
        num_reqs: That were scheduled.
        prepare_ns: The executor was given the step and moves its arrays to the device.
        forward_ns: The model began to run.
        sample_ns: The forward pass had returned, sampling began.
        launched_ns: Sampling had returned.
        done_ns: The sampled ids were on the host, or the step had failed.
        end_ns: The scheduler had them.
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

    def end_launch(self, forward_ns: int) -> None:
        """Note that forward pass and sampling have returned or raised; a failed launch reuses its end for later parts.

        Args:
            forward_ns: When the model began to run, as the executor says; an older step's if this one failed before.
        """
        self.launched_ns = monotonic_ns()
        self.sample_ns = self.sample_ns or self.launched_ns
        self.forward_ns = min(max(forward_ns, self.prepare_ns), self.sample_ns)

    def until_done(self) -> tuple[int, int, int, int, int, int]:
        """``schedule_ns`` to ``done_ns``, in order, as ``Scheduler.record_step_times`` takes them."""
        return self.schedule_ns, self.prepare_ns, self.forward_ns, self.sample_ns, self.launched_ns, self.done_ns


StepObserver: TypeAlias = Callable[[StepTimes], object]
"""Called in the engine's thread after a step: it must be quick, and must not raise."""
