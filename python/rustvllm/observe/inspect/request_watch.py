"""``RequestWatch``: records the journeys of a few requests while a viewer watches them.

Nothing is traced before the first watch begins, or after the last has ended or its viewer has been silent for long.
"""

import threading
from collections.abc import Mapping
from time import monotonic_ns
from typing import Any, Final

from rustvllm.exceptions import InvalidRequestError
from rustvllm.observe.engine_watch import EngineWatch
from rustvllm.observe.steps.times import StepTimes
from rustvllm.observe.trace.journey import RequestJourney
from rustvllm.observe.trace.tracer import Tracer, TraceRecord

MAX_WATCHES: Final = 16
"""The most requests that are watched at the same time."""
MAX_RECORDS: Final = 8192
"""The most records kept for each request; the newest are kept."""
PATIENCE_NS: Final = 15 * 10**9
"""How long a watch lasts after its last query."""
_MAX_TAKEN: Final = 2048
"""The most records in one answer."""
_MAX_ID_CHARS: Final = 512


class RequestWatch:
    """See the module. Used only by the thread that steps."""

    def __init__(self, engine: EngineWatch) -> None:
        self._engine = engine
        self._sink = _WatchSink()
        self._own_tracer: Tracer | None = None

    def answer(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Begin, read or end a watch.

        ``request_id`` is the request's id or the beginning of it: if a server calls a request ``cmpl-x``, its engine
        knows it as ``cmpl-x-…``.

        Raises:
            InvalidRequestError: The query is invalid, there are too many watches, or this request is not watched.
        """
        do, request_id = wanted.get("do"), wanted.get("request_id")
        if not isinstance(request_id, str) or not 0 < len(request_id) <= _MAX_ID_CHARS:
            raise InvalidRequestError(
                f"request_id must be a text of 1 to {_MAX_ID_CHARS} characters, got {request_id!r:.80}", "request_id"
            )
        now = monotonic_ns()
        self._sink.drop_silent(now)
        if do == "begin":
            self._begin(request_id, now)
            return {"time_ns": now}
        if do == "take":
            since = wanted.get("since", 0)
            if not isinstance(since, int) or since < 0:
                raise InvalidRequestError(f"since must be a whole number of at least 0, got {since!r:.80}", "since")
            return self._take(request_id, since, now)
        if do == "end":
            self._end(request_id)
            self._rest_if_unwatched()
            return {}
        raise InvalidRequestError(f"do must be begin, take or end, got {do!r:.80}", "do")

    def _begin(self, request_id: str, now: int) -> None:
        if len(self._sink.watches) >= MAX_WATCHES and request_id not in self._sink.watches:
            raise InvalidRequestError(
                f"{MAX_WATCHES} requests are already watched, which is the limit; try again later"
            )
        if (watch := self._sink.watches.get(request_id)) is not None:
            watch.num_viewers += 1
            watch.last_asked_ns = now
            return
        was_unwatched = not self._sink.watches
        self._sink.watches[request_id] = _Watch(request_id, now)
        if not was_unwatched:
            return
        if self._engine.tracer is None:
            self._own_tracer = Tracer([self._sink])
            self._engine.trace_to(self._own_tracer)
        else:
            self._engine.tracer.add_sink(self._sink)
        self._engine.add(self._look_after)

    def _end(self, request_id: str) -> None:
        """A viewer goes; the last one ends the watch."""
        watch = self._sink.watches.get(request_id)
        if watch is None:
            return
        watch.num_viewers -= 1
        if not watch.num_viewers:
            del self._sink.watches[request_id]

    def _take(self, request_id: str, since: int, now: int) -> dict[str, Any]:
        self._engine.flush()  # adds what happened outside of steps
        watch = self._sink.watches.get(request_id)
        if watch is None:
            raise InvalidRequestError(f"request {request_id!r} is not watched, or no longer; begin again", "request_id")
        watch.last_asked_ns = now
        with self._sink.lock:  # front ends in this process write records, too
            kept = list(enumerate(watch.journey.records, watch.journey.num_dropped))
        records = [{"index": index, **record.as_dict()} for index, record in kept if index >= since][:_MAX_TAKEN]
        return {
            "time_ns": now,
            "records": records,
            "num_dropped": watch.journey.num_dropped,
            "is_finished": watch.is_finished and (not records or records[-1]["index"] == kept[-1][0]),
        }

    def _look_after(self, times: StepTimes) -> None:
        """End the watches whose viewers have gone; called after each step."""
        if self._sink.drop_silent(times.end_ns):
            self._rest_if_unwatched()

    def _rest_if_unwatched(self) -> None:
        if self._sink.watches:
            return
        self._engine.remove(self._look_after)
        if self._own_tracer is not None and self._engine.tracer is self._own_tracer:
            self._engine.trace_to(None)
        elif self._engine.tracer is not None:
            self._engine.tracer.remove_sink(self._sink)
        self._own_tracer = None


class _Watch:
    """A watched request."""

    def __init__(self, request_id: str, now: int) -> None:
        self.journey = RequestJourney(request_id, MAX_RECORDS)
        self.last_asked_ns = now
        self.num_viewers = 1
        self.is_finished = False
        self.steps: set[int] = set()

    def is_of(self, request_id: str) -> bool:
        """Whether an engine's id belongs to the watched request, or to one of its samples."""
        wanted = self.journey.request_id
        index, underscore, rest = request_id.partition("_")
        return request_id.startswith(wanted) or (bool(underscore) and index.isdigit() and rest.startswith(wanted))


class _WatchSink:
    """Keeps the records of watched requests."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.watches: dict[str, _Watch] = {}
        self._planned: dict[int, TraceRecord] = {}

    def write(self, record: TraceRecord) -> None:
        """Keep a record, if it belongs to a watched request."""
        with self.lock:
            self._write(record)

    def _write(self, record: TraceRecord) -> None:
        watches = list(self.watches.values())
        if record.request_id is not None:
            for watch in watches:
                if watch.is_of(record.request_id):
                    self._write_own(watch, record)
        elif record.step is not None:
            if record.event == "planned":
                self._planned = {step: kept for step, kept in self._planned.items() if step > record.step - 4}
                self._planned[record.step] = record
            for watch in watches:
                if record.step in watch.steps:
                    watch.journey.add(record)
                    if record.event == "updated":
                        watch.steps.discard(record.step)

    def _write_own(self, watch: _Watch, record: TraceRecord) -> None:
        if record.event == "scheduled" and record.step is not None and record.step not in watch.steps:
            watch.steps.add(record.step)
            if (planned := self._planned.get(record.step)) is not None:
                watch.journey.add(planned)
        watch.journey.add(record)
        watch.is_finished = watch.is_finished or record.event == "finished"

    def drop_silent(self, now: int) -> bool:
        """End the watches that had no query lately; returns whether there were any."""
        silent = [each for each, watch in self.watches.items() if now - watch.last_asked_ns > PATIENCE_NS]
        for request_id in silent:
            del self.watches[request_id]
        return bool(silent)

    def flush(self) -> None:
        """Do nothing: records can be read at once."""

    def close(self) -> None:
        """Do nothing: the records stay."""
