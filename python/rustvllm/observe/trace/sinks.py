"""Which sinks a :class:`~rustvllm.config.TracingConfig` asks for, process by process."""

from rustvllm.config import TracingConfig
from rustvllm.observe.trace.trace_file import TraceFile, begin_trace_file
from rustvllm.observe.trace.tracer import CallbackSink, LogSink, TraceCallback, Tracer, TraceSink


def make_tracer(
    tracing: TracingConfig,
    process_name: str,
    *,
    owns_file: bool,
    has_overlap: bool = False,
    callback: TraceCallback | None = None,
) -> Tracer | None:
    """The tracer of one process; None if the configuration asks for no records.

    Args:
        tracing: What is asked for.
        process_name: What a trace file calls the process.
        owns_file: The process begins the trace file and ends it; others append to it.
        has_overlap: Two steps of its engine may be under way at a time.
        callback: Called with every record.

    Raises:
        ConfigError: The trace file cannot be written.
    """
    sinks: list[TraceSink] = []
    if tracing.log:
        sinks.append(LogSink())
    if tracing.file is not None:
        if owns_file:
            begin_trace_file(tracing.file)
        tracks = 2 if has_overlap else 1
        sinks.append(TraceFile(tracing.file, process_name, is_owner=owns_file, num_step_tracks=tracks))
    if callback is not None:
        sinks.append(CallbackSink(callback))
    return Tracer(sinks) if sinks else None
