"""``StepSummary``: an engine's last steps one by one, and the sums of all, while a viewer queries them.

It observes the engine's steps from the first query on, and stops when the queries stop, so an engine without viewers
does no work for it.
"""

from collections import deque
from time import monotonic_ns
from typing import Any, Final

from rustvllm.observe.engine_watch import EngineWatch
from rustvllm.observe.steps.times import StepTimes

MAX_STEPS: Final = 256
"""How many steps are kept one by one."""
PATIENCE_NS: Final = 10 * 10**9
"""How long steps are observed after the last query."""
PHASES: Final = ("schedule", "prepare", "forward", "sample", "wait", "update")


class StepSummary:
    """See the module. Used only by the thread that steps."""

    def __init__(self, engine: EngineWatch) -> None:
        self._engine = engine
        self._is_observing = False
        self._last_asked_ns = 0
        self._steps: deque[StepTimes] = deque(maxlen=MAX_STEPS)
        self._phase_ns = [0] * len(PHASES)
        self._num_steps = self._total_ns = self._num_tokens = self._num_reqs = 0

    def state(self, since_step: int, max_steps: int) -> dict[str, Any]:
        """The current summary; each query also extends the observation.

        Args:
            since_step: Leave out steps up to this one.
            max_steps: How many of the remaining steps to return; the newest.

        Returns:
            ``phases``: their names. ``totals``: the number of observed steps, their nanoseconds by phase and in total,
            tokens and requests. ``steps``: ``[step, began_ns, num_tokens, num_reqs, nanoseconds of each phase…]``.
        """
        self._last_asked_ns = monotonic_ns()
        if not self._is_observing:
            self._is_observing = True
            self._steps.clear()
            self._engine.add(self._observe)
        newest = [times for times in self._steps if times.step > since_step][-max_steps:] if max_steps > 0 else []
        return {
            "phases": PHASES,
            "totals": {
                "num_steps": self._num_steps,
                "total_ns": self._total_ns,
                "phase_ns": self._phase_ns,
                "num_tokens": self._num_tokens,
                "num_reqs": self._num_reqs,
            },
            "steps": [
                [times.step, times.schedule_ns, times.num_tokens, times.num_reqs, *_durations(times)]
                for times in newest
            ],
        }

    def _observe(self, times: StepTimes) -> None:
        self._steps.append(times)
        self._num_steps += 1
        self._num_tokens += times.num_tokens
        self._num_reqs += times.num_reqs
        self._total_ns += times.end_ns - times.schedule_ns
        self._phase_ns = [total + spent for total, spent in zip(self._phase_ns, _durations(times), strict=True)]
        if times.end_ns - self._last_asked_ns > PATIENCE_NS:
            self._is_observing = False
            self._engine.remove(self._observe)


def _durations(times: StepTimes) -> tuple[int, ...]:
    """Nanoseconds of each of :data:`PHASES`."""
    return (
        times.prepare_ns - times.schedule_ns,
        times.forward_ns - times.prepare_ns,
        times.sample_ns - times.forward_ns,
        times.launched_ns - times.sample_ns,
        times.done_ns - times.launched_ns,
        times.end_ns - times.done_ns,
    )
