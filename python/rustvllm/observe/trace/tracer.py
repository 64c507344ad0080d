"""What happens to requests, as it happens: :class:`TraceRecord`, the :class:`Tracer` that hands it on, and two sinks.

A request passes through layers, in the order of :data:`LAYERS`; each notes what it did and when. A component, by the
name that the field has for it (``Scheduler``, ``Sampler``, …), does the work of a layer. ``docs/tracing.md`` has a
table of every record. No record holds a prompt's text, an output's text or a key.
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
"""In the order in which an engine starts and a request passes through it."""

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
"""Which component does the work of a layer, unless a record names another."""

CONTENT: Final = frozenset({"token_id"})
"""Extras that are part of what a user asked or was answered: neither the log nor a trace file has them."""

_NONE: Final[Mapping[str, Any]] = {}
_COMPONENT_WIDTH: Final = max(map(len, COMPONENTS.values()))


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One thing that happened.

    Attributes:
        timestamp_ns: When it began, in nanoseconds of ``time.monotonic_ns``, which all processes of a machine share.
        layer: Where, one of :data:`LAYERS`.
        event: What, by the names of ``docs/tracing.md``.
        request_id: To which request; None for a whole step and for the start of the engine.
        step: The engine's step, counted from 1; None outside of one.
        status: The request's status in the scheduler (``RUNNING``, …); None where the scheduler does not say.
        num_computed_tokens: Tokens of the request with KV in the cache once ``step`` is done.
        num_tokens: Tokens of prompt and known output.
        duration_ns: How long it took; None for what takes no time.
        extras: What else is known, by the names of ``docs/tracing.md``; values that JSON can hold.
        component: What did it, by the field's name; empty: the one that :data:`COMPONENTS` has for the layer.
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
        """Name the component."""
        if not self.component:
            object.__setattr__(self, "component", COMPONENTS.get(self.layer, ""))

    def as_dict(self) -> dict[str, Any]:
        """The record as what ``json.dumps`` takes, without what is None."""
        return {name: value for name, value in asdict(self).items() if value is not None and value != _NONE}


TraceCallback: TypeAlias = Callable[[TraceRecord], object]
StatusCallback: TypeAlias = Callable[[str, str | None, str], object]
"""Called with a request's id, its status before (None: the engine did not know it) and its status now."""


class TraceSink(Protocol):
    """Takes records. Threads of one tracer come one after the other."""

    def write(self, record: TraceRecord) -> None:
        """Take one; quickly, and without raising."""

    def flush(self) -> None:
        """Nothing more comes for a moment."""

    def close(self) -> None:
        """Nothing more comes; idempotent."""


class Tracer:
    """Hands each record to every sink; any thread may write."""

    def __init__(self, sinks: Iterable[TraceSink] = ()) -> None:
        self._sinks: list[TraceSink] = list(sinks)
        self._lock = threading.RLock()  # a callback may use the engine, which writes records

    def add_sink(self, sink: TraceSink) -> None:
        """Have a sink take what comes from now on."""
        with self._lock:
            self._sinks = [*self._sinks, sink]

    def remove_sink(self, sink: TraceSink) -> None:
        """Have it take no more; one that is not there is ignored."""
        with self._lock:
            self._sinks = [other for other in self._sinks if other is not sink]

    @property
    def has_sinks(self) -> bool:
        """Whether anything takes the records."""
        return bool(self._sinks)

    def write(self, record: TraceRecord) -> None:
        """Hand on a record."""
        with self._lock:
            for sink in self._sinks:
                sink.write(record)

    def note(self, layer: str, event: str, began_ns: int | None = None, **extras: Any) -> None:
        """Write a record of no request; with ``began_ns``, of something that ends now."""
        now = monotonic_ns()
        if began_ns is None:
            self.write(TraceRecord(now, layer, event, extras=extras))
        else:
            self.write(TraceRecord(began_ns, layer, event, duration_ns=now - began_ns, extras=extras))

    def flush(self) -> None:
        """Tell the sinks that nothing comes for a moment."""
        with self._lock:
            for sink in self._sinks:
                sink.flush()

    def close(self) -> None:
        """End the sinks; idempotent."""
        with self._lock:
            for sink in self._sinks:
                sink.close()


is_debugging: Final[Callable[[], bool]] = partial(logger.isEnabledFor, logging.DEBUG)
"""Whether the log shows the journey of requests because its level is DEBUG; one look-up in a dictionary."""


class LogSink:
    """One line per record, under the logger ``rustvllm.trace``: its second, component, request, event and numbers.

    Where the log's lines are JSON the record is also in the field ``trace``.

    Args:
        level: Of the lines.
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
        """Lines are written at once."""

    def close(self) -> None:
        """Do nothing: the logger is shared."""


class CallbackSink:
    """Gives records to a function; one that raises gets no more, without effect on the others."""

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
        """It was called at once."""

    def close(self) -> None:
        """Call it no more."""
        self._callback = None


class StatusSink:
    """Tells a function of each change of a request's status; one that raises gets no more, without effect on others."""

    def __init__(self, callback: StatusCallback) -> None:
        self._callback: StatusCallback | None = callback
        self._statuses: dict[str, str] = {}

    def write(self, record: TraceRecord) -> None:
        """Call the function if the record shows another status than the one before it."""
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
        """It was called at once."""

    def close(self) -> None:
        """Call it no more."""
        self._callback = None
        self._statuses.clear()


def _fields(record: TraceRecord) -> dict[str, Any]:
    """The record for a line of JSON, without content and secrets."""
    shown = record.as_dict()
    if extras := shown.get("extras"):
        shown["extras"] = {name: value for name, value in extras.items() if name not in CONTENT}
    return {"trace": json.loads(redact(json.dumps(shown, default=str)))}


def format_record(record: TraceRecord) -> str:
    """A record as one line of a log."""
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
    # A path or an id is its client's: no line of its own making may come of it.
    return line if line.isprintable() else line.encode("unicode_escape").decode("ascii")


def format_duration(nanoseconds: float) -> str:
    """A time with three digits and its unit."""
    for limit, unit, scale in ((999.5e3, "µs", 1e3), (999.5e6, "ms", 1e6)):
        if nanoseconds < limit:
            value = nanoseconds / scale
            return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.3g} {unit}"
    return f"{nanoseconds / 1e9:.3g} s"


def format_blocks(block_ids: Sequence[int]) -> str:
    """Block ids with runs drawn together: ``1-3 7``."""
    runs: list[list[int]] = []
    for block_id in block_ids:
        if runs and block_id == runs[-1][1] + 1:
            runs[-1][1] = block_id
        else:
            runs.append([block_id, block_id])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def masked_command_line(argv: Sequence[str]) -> str:
    """Arguments as one line without secrets: what follows a flag that is named like one is masked."""
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
    """The program that runs, without its arguments: they are its own affair."""
    return sys.argv[0] if sys.argv and sys.argv[0] not in {"", "-c"} else "python"


def _short(value: Any) -> str:
    if isinstance(value, list | tuple) and value and all(isinstance(item, int) for item in value):
        return f"[{format_blocks(value)}]"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 200 else text[:197] + "..."
