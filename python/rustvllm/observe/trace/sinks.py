"""Makes the sinks that a :class:`~rustvllm.config.TracingConfig` asks for, for each process."""

import logging

from rustvllm.config import TracingConfig
from rustvllm.exceptions import ConfigError
from rustvllm.observe.trace.trace_file import TraceFile, begin_trace_file
from rustvllm.observe.trace.tracer import (
    CallbackSink,
    LogSink,
    StatusCallback,
    StatusSink,
    TraceCallback,
    Tracer,
    TraceSink,
    is_debugging,
)


def make_tracer(
    tracing: TracingConfig,
    process_name: str,
    *,
    owns_file: bool,
    has_overlap: bool = False,
    callback: TraceCallback | None = None,
    on_status_change: StatusCallback | None = None,
) -> Tracer | None:
    """The tracer of one process; None if neither the configuration nor the log's level asks for records.

    Args:
        tracing: The configuration.
        process_name: The name of the process in a trace file.
        owns_file: Whether the process begins and ends the trace file; others append to it.
        has_overlap: Whether two steps of its engine may overlap.
        callback: Called with every record.
        on_status_change: Called with every change of a request's status.

    Raises:
        ConfigError: The trace file cannot be written, or a callback cannot be called.
    """
    for name, call in {"trace": callback, "on_status_change": on_status_change}.items():
        if call is not None and not callable(call):
            raise ConfigError(f"{name} must be a function, got {call!r:.200}")
    sinks: list[TraceSink] = []
    if tracing.log:
        sinks.append(LogSink())
    elif is_debugging():
        sinks.append(LogSink(logging.DEBUG))
    if tracing.file is not None:
        if owns_file:
            begin_trace_file(tracing.file)
        tracks = 2 if has_overlap else 1
        sinks.append(TraceFile(tracing.file, process_name, is_owner=owns_file, num_step_tracks=tracks))
    if callback is not None:
        sinks.append(CallbackSink(callback))
    if on_status_change is not None:
        sinks.append(StatusSink(on_status_change))
    return Tracer(sinks) if sinks else None
