"""``StepTimes``: when each part of a step began; for whoever watches an engine (metrics, traces, the live page).

::

    schedule → prepare → forward → sample → wait → update
             ^         ^         ^        ^      ^        ^
        prepare_ns forward_ns sample_ns launched_ns done_ns end_ns

On the CPU each part is work that has been done when the next begins, and the parts add up to the step. On a GPU, and
with ``async_scheduling``, ``forward`` and ``sample`` end when the device has been told what to do, and ``wait`` holds
the rest of its work and, with overlap, the planning of the next step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step; times in nanoseconds of CLOCK_MONOTONIC, ascending.

    Attributes:
        step: its number, ``SchedulerOutput.step``.
        schedule_ns: before the scheduler was asked.
        prepare_ns: the executor was given the step and moves its arrays to the device.
        forward_ns: the model began to run.
        sample_ns: the forward pass had returned, sampling began.
        launched_ns: sampling had returned.
        done_ns: the sampled ids were on the host, or the step had failed.
        end_ns: the scheduler had taken them.
        num_tokens: that were scheduled.
        num_reqs: that were scheduled.
    """

    step: int
    schedule_ns: int
    prepare_ns: int
    forward_ns: int
    sample_ns: int
    launched_ns: int
    done_ns: int
    end_ns: int
    num_tokens: int
    num_reqs: int


StepObserver: TypeAlias = Callable[[StepTimes], object]
"""Called in the engine's thread after a step: it must be quick, and must not raise."""
