"""``EngineWatch``: connects an engine's main loop with everything that observes it: traces, metrics and pages.

The engine reports when a step begins and ends. What is recorded about it, and for whom, is decided here and never in
the loop. Used only by the thread that steps.
"""

import logging
from time import monotonic_ns

from rustvllm import _core
from rustvllm.observe.steps.times import StepObserver, StepTimes
from rustvllm.observe.steps.trace_file import StepTrace
from rustvllm.observe.trace.step_tracer import StepTracer
from rustvllm.observe.trace.tracer import LogSink, Tracer, is_debugging


class EngineWatch:
    """Reports each step to observers.

    Args:
        scheduler: The engine's scheduler.
        step_trace: A file with a line for each step; None disables it.
        has_clients: Whether requests come from other processes, so that the scheduler knows them as ``id@client``.

    Attributes:
        observers: Called in this order with the times of each step when it has ended.
        tracer: Gets a record of every step and of what it did to requests; None disables tracing.
    """

    def __init__(
        self, scheduler: _core.Scheduler, step_trace: StepTrace | None = None, *, has_clients: bool = False
    ) -> None:
        self.observers: tuple[StepObserver, ...] = ()
        self.tracer: Tracer | None = None
        self._scheduler = scheduler
        self._has_clients = has_clients
        self._step_tracer: StepTracer | None = None
        self._debug_sink: LogSink | None = None
        self._step_trace = step_trace
        if step_trace is not None:
            self.add(step_trace.record)

    def add(self, observer: StepObserver) -> None:
        """Call an observer at the end of each step from now on."""
        self.observers = (*self.observers, observer)

    def remove(self, observer: StepObserver) -> None:
        """Stop calling an observer; it may remove itself while it is called."""
        self.observers = tuple(each for each in self.observers if each != observer)

    def trace_to(self, tracer: Tracer | None) -> None:
        """Replace the tracer, from the next step on; None ends tracing.

        Must not be called while another thread steps.
        """
        if (before := self._step_tracer) is not None:
            self.remove(before.observe)
            before.end()
        self.tracer, self._step_tracer, self._debug_sink = tracer, None, None
        if tracer is not None:
            self._step_tracer = StepTracer(self._scheduler, tracer, has_clients=self._has_clients)
            self.add(self._step_tracer.observe)

    def begin_step(self) -> None:
        """Note that a step begins."""
        if self._step_tracer is None:
            if not is_debugging():
                return
            sink = LogSink(logging.DEBUG)
            self.trace_to(Tracer([sink]))
            self._debug_sink = sink
        elif self._debug_sink is not None and not is_debugging():
            self._end_debugging(self._debug_sink)
        if self._step_tracer is not None:
            self._step_tracer.begin()

    def _end_debugging(self, sink: LogSink) -> None:
        """End the tracer that was made for the log's DEBUG level, which has been raised, unless it has other sinks."""
        if self.tracer is not None:
            self.tracer.remove_sink(sink)
            if not self.tracer.has_sinks:
                self.trace_to(None)

    def end_step(self, times: StepTimes) -> None:
        """Note that a step has ended or failed: complete its times and call the observers."""
        if self.observers:
            times.end_ns = monotonic_ns()
            for observe in self.observers:
                observe(times)

    def flush(self) -> None:
        """Write everything that is waiting, and what happened to requests outside of steps."""
        if self._step_tracer is not None:
            self._step_tracer.flush()
        if self._step_trace is not None:
            self._step_trace.flush()

    def close(self) -> None:
        """End the step trace's file; the tracer's owner ends the tracer."""
        if self._step_trace is not None:
            self._step_trace.close()
