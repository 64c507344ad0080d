"""``TraceFile``: writes steps and requests to a file that Perfetto and Chrome's tracing page can show.

The format is Chrome's JSON array of events. Several processes write one file: its owner begins it with ``[``, each
process appends whole events with one ``write`` at a time, and the owner ends the array when all others have ended. If
the end is missing, after a kill, both viewers can still read the file. ``docs/tracing.md`` says what is shown where.
"""

import atexit
import contextlib
import errno
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any, Final

from rustvllm.exceptions import ConfigError
from rustvllm.logger import init_logger
from rustvllm.observe.trace.tracer import CONTENT, REQUEST_LAYERS, TraceRecord
from rustvllm.process.private_file import open_private

logger = init_logger(__name__)

MAX_BUFFERED_BYTES: Final = 256 << 10
"""The most bytes of events that wait to be written."""
FLUSH_SECONDS: Final = 0.5
MAX_OPEN_TRACKS: Final = 1 << 16
"""How many running requests are remembered; beyond this, the ends of the oldest are not shown."""
STEP_TRACK, OVERLAPPING_TRACK = 1, 2
"""Tracks for steps, and for every second step if two may overlap."""
FRONT_END_TRACK = 3


class TraceFile:
    """A sink of a tracer that appends to a file which :func:`begin_trace_file` has begun.

    If the file can no longer be written, only the trace ends; the log says so once.

    Args:
        path: The file.
        process_name: The name of this process in the viewer.
        is_owner: Whether to end the array on :meth:`close`, or when the program ends.
        num_step_tracks: 2 if steps may overlap.
    """

    def __init__(self, path: Path, process_name: str, *, is_owner: bool = False, num_step_tracks: int = 1) -> None:
        self._path = path
        self._is_owner = is_owner
        self._num_step_tracks = num_step_tracks
        self._pid = os.getpid()
        self._lines: list[str] = []
        self._num_bytes = 0
        self._flushed_at = monotonic()
        self._steps: dict[int, list[TraceRecord]] = {}
        self._status: OrderedDict[str, str] = OrderedDict()
        self._open: OrderedDict[str, None] = OrderedDict()
        self._descriptor: int | None = None
        self._lock = threading.Lock()
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            self._give_up(error)
        self._name("process_name", 0, process_name)
        for track, name in _TRACKS.items():
            self._name("thread_name", track, name)
        if is_owner:
            atexit.register(self.close)

    def write(self, record: TraceRecord) -> None:
        """Turn a record into events, which are written later."""
        if self._descriptor is None:
            return
        if record.layer in _STEP_LAYERS and record.request_id is None:
            self._write_step(record)
        elif record.request_id is not None and record.layer in _ENGINE_LAYERS:
            self._write_status(record, record.request_id)
        elif record.layer in ("entry", "input_processing", "response"):
            self._write_front_end(record)
        elif record.duration_ns is not None:
            name = record.layer if record.layer in REQUEST_LAYERS else f"{record.layer}: {record.event}"
            self._slice(name, record, FRONT_END_TRACK)
        if self._num_bytes >= MAX_BUFFERED_BYTES or monotonic() - self._flushed_at >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Append the waiting events."""
        with self._lock:
            lines, self._lines, self._num_bytes = self._lines, [], 0
            self._flushed_at = monotonic()
            if not lines or self._descriptor is None:
                return
            data = "".join(lines).encode()
            try:
                written = os.write(self._descriptor, data)
                if written < len(data):
                    _take_back(self._descriptor, written)
                    raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes were written")
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        """Write the rest, and end the array if this object owns the file; idempotent."""
        self.flush()
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        atexit.unregister(self.close)
        os.close(descriptor)
        if self._is_owner:
            end_trace_file(self._path)

    # -- events ---------------------------------------------------------------------------------------------------

    def _write_step(self, record: TraceRecord) -> None:
        """Add a step when it is over: its slice, with its phases inside."""
        if record.step is None:
            return
        phases = self._steps.setdefault(record.step, [])
        phases.append(record)
        if record.event != "updated":
            while len(self._steps) > _MAX_OPEN_STEPS:
                del self._steps[min(self._steps)]
            return
        del self._steps[record.step]
        track = STEP_TRACK + record.step % self._num_step_tracks
        begin_ns, end_ns = phases[0].timestamp_ns, record.timestamp_ns + (record.duration_ns or 0)
        planned = phases[0].extras
        name = f"step {record.step}"
        self._event(name, "step", "X", begin_ns, track, dur=(end_ns - begin_ns) / 1e3, args=dict(planned))
        for phase in phases:
            self._slice(phase.layer, phase, track)
        requests = {name: record.extras[f"num_{name}"] for name in ("running", "waiting")}
        self._event("requests", "engine", "C", end_ns, 0, args=requests)
        self._event("KV cache", "engine", "C", end_ns, 0, args={"used": record.extras["kv_cache_usage"]})

    def _write_status(self, record: TraceRecord, request_id: str) -> None:
        """Add a request's status in the scheduler, on a track of the request with one status after the other."""
        status, at_ns = record.status or "", record.timestamp_ns
        before = self._status.get(request_id)
        is_finished = status.startswith("FINISHED")
        if status == before or (before is None and is_finished):
            return
        if before is None:
            self._event(request_id, "request", "b", at_ns, 0, id=request_id, args=_arguments(record))
        else:
            self._event(before, "request", "e", at_ns, 0, id=request_id)
        if is_finished:
            self._event(request_id, "request", "e", at_ns, 0, id=request_id, args=_arguments(record))
            del self._status[request_id]
            return
        self._event(status, "request", "b", at_ns, 0, id=request_id, args=_arguments(record))
        self._status[request_id] = status
        if len(self._status) > MAX_OPEN_TRACKS:
            self._status.popitem(last=False)

    def _write_front_end(self, record: TraceRecord) -> None:
        """Add a request's time in the front end, from its entry to its last output."""
        request_id = record.request_id
        if request_id is None:
            return
        if record.layer == "entry":
            self._event(request_id, "front end", "b", record.timestamp_ns, 0, id=request_id, args=_arguments(record))
            self._open[request_id] = None
            if len(self._open) > MAX_OPEN_TRACKS:
                self._open.popitem(last=False)
        elif request_id in self._open and record.layer == "input_processing":
            end_ns = record.timestamp_ns + (record.duration_ns or 0)
            arguments = _arguments(record)
            self._event("input processing", "front end", "b", record.timestamp_ns, 0, id=request_id, args=arguments)
            self._event("input processing", "front end", "e", end_ns, 0, id=request_id)
        elif request_id in self._open and record.event in ("finished", "abandoned"):
            end_ns = record.timestamp_ns + (record.duration_ns or 0)
            self._event(request_id, "front end", "e", end_ns, 0, id=request_id, args=_arguments(record))
            del self._open[request_id]

    def _slice(self, name: str, record: TraceRecord, track: int) -> None:
        duration = (record.duration_ns or 0) / 1e3
        self._event(name, record.layer, "X", record.timestamp_ns, track, dur=duration, args=_arguments(record))

    def _name(self, what: str, track: int, name: str) -> None:
        self._append({"name": what, "ph": "M", "ts": 0, "pid": self._pid, "tid": track, "args": {"name": name}})

    def _event(self, name: str, category: str, phase: str, at_ns: int, track: int, **fields: Any) -> None:
        event = {"name": name, "cat": category, "ph": phase, "ts": at_ns / 1e3, "pid": self._pid, "tid": track}
        self._append(event | fields)

    def _append(self, event: Mapping[str, Any]) -> None:
        line = json.dumps(event, separators=(",", ":"), default=str) + ",\n"
        self._lines.append(line)
        self._num_bytes += len(line)

    def _give_up(self, error: OSError) -> None:
        logger.error("trace_file %s ends here, because it cannot be written: %s", self._path, error.strerror)
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def begin_trace_file(path: Path) -> None:
    """Make an empty file for :class:`TraceFile` to append to, replacing an existing one; a new file is private.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        with open(path, "w", encoding="ascii", opener=open_private) as file:
            file.write("[\n")
    except OSError as error:
        raise ConfigError(f"trace_file {str(path)!r} cannot be written: {error.strerror}") from error


def end_trace_file(path: Path) -> None:
    """End the array after the last writer has finished; a file that cannot be written stays as it is."""
    last = {"name": "process_labels", "ph": "M", "ts": 0, "pid": os.getpid(), "tid": 0, "args": {"labels": "rustvllm"}}
    try:
        with open(path, "a", encoding="ascii", opener=open_private) as file:
            file.write(json.dumps(last, separators=(",", ":")) + "\n]\n")
    except OSError as error:
        logger.error("trace_file %s has no end: %s", path, error.strerror)  # noqa: TRY400 -- nothing to be traced


def _take_back(descriptor: int, num_bytes: int) -> None:
    """Remove the last append, which may end in half an event, unless another process has appended since."""
    with contextlib.suppress(OSError):
        end = os.lseek(descriptor, 0, os.SEEK_CUR)
        if os.fstat(descriptor).st_size == end:
            os.ftruncate(descriptor, end - num_bytes)


def _arguments(record: TraceRecord) -> dict[str, Any]:
    """What the viewer shows of a selected event."""
    shown = {name: value for name, value in record.extras.items() if name not in CONTENT}
    for name in ("step", "num_computed_tokens", "num_tokens"):
        if (value := getattr(record, name)) is not None:
            shown[name] = value
    return shown


_TRACKS: Final = {STEP_TRACK: "steps", OVERLAPPING_TRACK: "steps, overlapping", FRONT_END_TRACK: "front end"}
_STEP_LAYERS: Final = frozenset({"schedule", "execute", "sample", "update"})
_ENGINE_LAYERS: Final = _STEP_LAYERS | {"queue"}
_MAX_OPEN_STEPS: Final = 8
