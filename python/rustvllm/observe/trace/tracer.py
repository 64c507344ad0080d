"""Records what happens to requests: :class:`TraceRecord`, the :class:`Tracer` that passes records on, and three sinks.

A request passes through layers, in the order of :data:`LAYERS`; each records what it did and when. A component with its
usual name (``Scheduler``, ``Sampler``, …) does the work of a layer. ``docs/tracing.md`` has a table of every record. No
record contains the text of a prompt or an output, or a key.
"""

import json
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from time import monotonic_ns
from typing import Any, Final, Protocol, TypeAlias

from rustvllm import envs
from rustvllm.logger import FIELDS, init_logger, redact, redact_mapping

logger = init_logger("rustvllm.trace")

STARTUP_LAYERS: Final = (
    "command_line",
    "arguments",
    "configuration",
    "tokenizer",
    "engine_client",
    "model_load",
)
REQUEST_LAYERS: Final = (
    "entry",
    "input_processing",
    "queue",
    "schedule",
    "execute",
    "sample",
    "update",
    "detokenise",
    "response",
)
LAYERS: Final = STARTUP_LAYERS + REQUEST_LAYERS
"""All layers, in the order in which an engine starts and a request passes through it."""

COMPONENTS: Final = {
    "command_line": "CLI",
    "arguments": "EngineArgs",
    "configuration": "EngineConfig",
    "tokenizer": "Tokenizer",
    "engine_client": "EngineCoreClient",
    "model_load": "EngineCore",
    "entry": "AsyncLLM",
    "input_processing": "InputProcessor",
    "queue": "Scheduler",
    "schedule": "Scheduler",
    "execute": "ModelRunner",
    "sample": "Sampler",
    "update": "Scheduler",
    "detokenise": "OutputProcessor",
    "response": "AsyncLLM",
}
"""The component that does the work of a layer, unless a record names another."""

CONTENT: Final = frozenset({"token_id"})
"""Extras that are part of a user's prompt or answer: neither the log nor a trace file has them."""

_NONE: Final[Mapping[str, Any]] = {}
_COMPONENT_WIDTH: Final = max(map(len, COMPONENTS.values()))


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One event.

    Attributes:
        timestamp_ns: When it began, in nanoseconds of ``time.monotonic_ns``, which all processes of a machine share.
        layer: Where it happened, one of :data:`LAYERS`.
        event: What happened, in the names of ``docs/tracing.md``.
        request_id: The request; None for a whole step and for the start of the engine.
        step: The engine's step, counted from 1; None outside of steps.
        status: The request's status in the scheduler (``RUNNING``, …); None if the scheduler does not report it.
        num_computed_tokens: Tokens of the request with KV in the cache once ``step`` is done.
        num_tokens: Tokens of the prompt and of the known output.
        duration_ns: How long it took; None for events without duration.
        extras: Other values, by the names of ``docs/tracing.md``; values that JSON can represent.
        component: The component that did it, by its usual name; if empty, the layer's entry in :data:`COMPONENTS`.
    """

    timestamp_ns: int
    layer: str
    event: str
    request_id: str | None = None
    step: int | None = None
    status: str | None = None
    num_computed_tokens: int | None = None
    num_tokens: int | None = None
    duration_ns: int | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)
    component: str = ""

    def __post_init__(self) -> None:
        """Set the component."""
        if not self.component:
            object.__setattr__(self, "component", COMPONENTS.get(self.layer, ""))

    def as_dict(self) -> dict[str, Any]:
        """The record for ``json.dumps``, without values that are None."""
        return {name: value for name, value in asdict(self).items() if value is not None and value != _NONE}


TraceCallback: TypeAlias = Callable[[TraceRecord], object]
StatusCallback: TypeAlias = Callable[[str, str | None, str], object]
"""Called with a request's id, its previous status (None if the engine did not know it) and its new status."""


class TraceSink(Protocol):
    """Takes records. A tracer never calls it from two threads at a time."""

    def write(self, record: TraceRecord) -> None:
        """Take a record; must be quick, and must not raise."""

    def flush(self) -> None:
        """Called when no record comes for a moment."""

    def close(self) -> None:
        """Called when no more records come; idempotent."""


class Tracer:
    """Passes each record to every sink; any thread may write."""

    def __init__(self, sinks: Iterable[TraceSink] = ()) -> None:
        self._sinks: list[TraceSink] = list(sinks)
        self._lock = threading.RLock()  # a callback may use the engine, which writes records

    def add_sink(self, sink: TraceSink) -> None:
        """Pass records from now on to a sink."""
        with self._lock:
            self._sinks = [*self._sinks, sink]

    def remove_sink(self, sink: TraceSink) -> None:
        """Stop passing records to a sink; an unknown sink is ignored."""
        with self._lock:
            self._sinks = [other for other in self._sinks if other is not sink]

    @property
    def has_sinks(self) -> bool:
        """Whether there are sinks."""
        return bool(self._sinks)

    def write(self, record: TraceRecord) -> None:
        """Pass a record to every sink."""
        with self._lock:
            for sink in self._sinks:
                sink.write(record)

    def note(self, layer: str, event: str, began_ns: int | None = None, **extras: Any) -> None:
        """Write a record without a request; with ``began_ns``, it has a duration that ends now."""
        now = monotonic_ns()
        if began_ns is None:
            self.write(TraceRecord(now, layer, event, extras=extras))
        else:
            self.write(TraceRecord(began_ns, layer, event, duration_ns=now - began_ns, extras=extras))

    def flush(self) -> None:
        """Tell the sinks that no record comes for a moment."""
        with self._lock:
            for sink in self._sinks:
                sink.flush()

    def close(self) -> None:
        """End the sinks; idempotent."""
        with self._lock:
            for sink in self._sinks:
                sink.close()


is_debugging: Final[Callable[[], bool]] = partial(logger.isEnabledFor, logging.DEBUG)
"""Whether the log shows the journey of requests because its level is DEBUG; costs one look-up in a dictionary."""


class LogSink:
    """Logs one line per record, with the logger ``rustvllm.trace``: time, component, request, event and numbers.

    If the log is JSON, the record is also in the field ``trace``.

    Args:
        level: The level of the lines.
    """

    def __init__(self, level: int = logging.INFO) -> None:
        self._level = level
        self._has_fields = envs.logging_format() == "json"

    def write(self, record: TraceRecord) -> None:
        """Log a record."""
        if logger.isEnabledFor(self._level):
            extra = {FIELDS: _fields(record)} if self._has_fields else None
            logger.log(self._level, "%s", format_record(record), extra=extra)

    def flush(self) -> None:
        """Do nothing: lines are written at once."""

    def close(self) -> None:
        """Do nothing: the logger is shared."""


class CallbackSink:
    """Passes records to a function; one that raises gets no more records, without effect on other sinks."""

    def __init__(self, callback: TraceCallback) -> None:
        self._callback: TraceCallback | None = callback

    def write(self, record: TraceRecord) -> None:
        """Call the function."""
        callback = self._callback
        if callback is None:
            return
        try:
            callback(record)
        except Exception:
            self._callback = None
            logger.exception("the trace callback %r raised an error and is not called again", callback)

    def flush(self) -> None:
        """Do nothing: the function was called at once."""

    def close(self) -> None:
        """Stop calling the function."""
        self._callback = None


class StatusSink:
    """Calls a function for each change of a request's status; one that raises is not called again."""

    def __init__(self, callback: StatusCallback) -> None:
        self._callback: StatusCallback | None = callback
        self._statuses: dict[str, str] = {}

    def write(self, record: TraceRecord) -> None:
        """Call the function if the record has another status than the previous one."""
        callback, request_id, status = self._callback, record.request_id, record.status
        if callback is None or request_id is None or status is None:
            return
        before = self._statuses.get(request_id)
        if status == before:
            return
        if status.startswith("FINISHED"):
            self._statuses.pop(request_id, None)
        else:
            self._statuses[request_id] = status
        try:
            callback(request_id, before, status)
        except Exception:
            self._callback = None
            logger.exception("on_status_change %r raised an error and is not called again", callback)

    def flush(self) -> None:
        """Do nothing: the function was called at once."""

    def close(self) -> None:
        """Stop calling the function."""
        self._callback = None
        self._statuses.clear()


def _fields(record: TraceRecord) -> dict[str, Any]:
    """The record for a line of JSON, without content and secrets."""
    shown = record.as_dict()
    if extras := shown.get("extras"):
        shown["extras"] = {name: value for name, value in extras.items() if name not in CONTENT}
    return {"trace": json.loads(redact(json.dumps(shown, default=str)))}


def format_record(record: TraceRecord) -> str:
    """A record as one log line."""
    parts = [f"{record.timestamp_ns / 1e9:.6f}", f"{record.component:<{_COMPONENT_WIDTH}}"]
    if record.step is not None:
        parts.append(f"step {record.step}")
    if record.request_id is not None:
        parts.append(record.request_id)
    parts.append(record.event)
    if record.status is not None:
        parts.append(f"{record.status} {record.num_computed_tokens}/{record.num_tokens}")
    parts += [f"{name}={_short(value)}" for name, value in record.extras.items() if name not in CONTENT]
    if record.duration_ns is not None:
        parts.append(f"({format_duration(record.duration_ns)})")
    line = " ".join(parts)
    # A client chooses paths and ids, so they must not be able to add lines of their own.
    return line if line.isprintable() else line.encode("unicode_escape").decode("ascii")


def format_duration(nanoseconds: float) -> str:
    """A duration with three digits and its unit."""
    for limit, unit, scale in ((999.5e3, "µs", 1e3), (999.5e6, "ms", 1e6)):
        if nanoseconds < limit:
            value = nanoseconds / scale
            return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.3g} {unit}"
    return f"{nanoseconds / 1e9:.3g} s"


def format_blocks(block_ids: Sequence[int]) -> str:
    """Block ids with consecutive ones joined: ``1-3 7``."""
    runs: list[list[int]] = []
    for block_id in block_ids:
        if runs and block_id == runs[-1][1] + 1:
            runs[-1][1] = block_id
        else:
            runs.append([block_id, block_id])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def masked_command_line(argv: Sequence[str]) -> str:
    """The arguments as one line without secrets: values of flags with secret names are masked."""
    shown, is_secret = [], False
    for argument in argv:
        if argument.startswith("-"):
            flag, equals, _ = argument.partition("=")
            name = flag.lstrip("-").replace("-", "_")
            is_secret = redact_mapping({name: "x"})[name] != "x" and not name.endswith("_file")
            if is_secret and equals:
                argument = f"{flag}=***"  # noqa: PLW2901 -- what is shown of it
        elif is_secret:
            argument = "***"  # noqa: PLW2901
        shown.append(redact(argument))
    return " ".join(shown)


def program_name() -> str:
    """The running program without its arguments, which are not recorded."""
    return sys.argv[0] if sys.argv and sys.argv[0] not in {"", "-c"} else "python"


def _short(value: Any) -> str:
    if isinstance(value, list | tuple) and value and all(isinstance(item, int) for item in value):
        return f"[{format_blocks(value)}]"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 200 else text[:197] + "..."
